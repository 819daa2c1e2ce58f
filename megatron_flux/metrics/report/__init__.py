"""``report.html`` of a run folder: one page that needs nothing but itself.

plotly.js is inside it once, and a content security policy forbids every request, so a page that needs the network would
be broken for everybody, not only for those without one. Whatever a configuration holds is text: autoescaped in HTML;
the figures' JSON lies in a data block in which ``<``, ``>`` and ``&`` are escaped and is parsed, never run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.plots import all_figures
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.redact import without_secrets
from megatron_flux.metrics.rows import findings, memory, rows
from megatron_flux.metrics.statistics import Record
from megatron_flux.metrics.summary import ARMS, read_json_object, read_summary, summarize
from megatron_flux.metrics.verdict import verdict


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder, replacing an earlier one, and return its path.

    A run that was killed has no ``summary.json``; its figures are then computed from the records, and the report says
    so. An arm without a file counts as one without records.

    Raises:
        UserError: this is no run folder, one of its files is damaged, or the page cannot be written.
    """
    run_dir = Path(run_dir)
    files = {arm: run_dir / arm / "metrics.jsonl" for arm in ARMS}
    if not any(file.exists() for file in files.values()):
        raise UserError(
            f"{run_dir} is not a run folder: it has no {' or '.join(f'{arm}/metrics.jsonl' for arm in ARMS)}; "
            "name a folder written by megatron-flux compare"
        )
    arms = {arm: read_records(file) if file.exists() else [] for arm, file in files.items()}
    config_file, summary_file = run_dir / "config.json", run_dir / "summary.json"
    config = read_json_object(config_file) if config_file.exists() else {}
    if summary_file.exists():
        summary = read_summary(summary_file)
    else:
        summary = summarize(arms["baseline"], arms["flux"], config)
        summary["notes"].append("There is no summary.json (the run did not end): computed from the records.")
    path = run_dir / "report.html"
    try:
        strict_json.write_atomically(path, render(summary, arms, config, name=run_dir.resolve().name))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that can be written") from error
    return path


def render(
    summary: Mapping[str, Any], arms: Mapping[str, list[Record]], config: Mapping[str, Any], *, name: str
) -> str:
    """The page as text. ``name`` is the run's name, shown in the title."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("megatron_flux.metrics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = all_figures(arms)
    command = summary.get("command")
    return environment.get_template("report.html.j2").render(
        name=name,
        verdict=verdict(summary),
        rows=rows(summary),
        findings=findings(summary),
        figures=figures,
        figures_json=_script_json({part["id"]: part["figure"] for part in figures if part["figure"]}),
        activity=_activity(arms["flux"]),
        command=" ".join(map(str, command)) if isinstance(command, list) else command,
        settings=[
            (title, list(_flat(without_secrets(value) if isinstance(value, Mapping) else {"": value})))
            for title, value in (
                ("Layout", summary.get("layout")),
                ("Device", summary.get("device")),
                ("Versions", summary.get("versions")),
                ("Configuration", config.get("config", config)),
            )
            if value
        ],
        plotlyjs=get_plotlyjs(),
    )


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _activity(flux: list[Record]) -> list[tuple[str, str]]:
    """What the operators did in the last iteration of the flux arm."""
    if not flux:
        return []
    last = flux[-1]
    return [
        ("all_gather_gemm calls", f"{last['flux/all_gather_gemm_calls']:,}"),
        ("gemm_reduce_scatter calls", f"{last['flux/gemm_reduce_scatter_calls']:,}"),
        ("received from peers", memory(last["flux/bytes_received"])),
        ("calls left to stock", f"{last['flux/fallback_calls']:,}"),
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``(dotted name, text)``; lists stay on one line."""
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping) and item:
            yield from _flat(item, name)
        elif isinstance(item, list):
            yield name, ", ".join(str(part) for part in item)
        else:
            yield name, "" if item is None else str(item)
