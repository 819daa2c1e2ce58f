"""Reports of run folders: ``report.html``, one page that needs nothing but itself, ``report.md`` and PNG figures.

A report is chapters of parts, made once from the records and then written in every form. What is missing or damaged in
a run is explained in its chapter. To be read in this order: ``render`` (what a report is made of, and HTML, Markdown,
PNG), ``terms`` (words that it explains), ``run`` (a folder as the report sees it), ``figures``, the chapters
``training`` with its ``ranks`` and ``benchmarks``; the one that lays several runs beside each other is here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.report import benchmarks, inference, render, training
from megatron_flux.metrics.report.render import Chapter, Part, Table, flat
from megatron_flux.metrics.report.run import Run, different_models, load, load_all, why_apart, with_pairs
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.metrics.summary import ARMS
from megatron_flux.metrics.table import UNKNOWN, counted, memory, milliseconds, relative, shown

_IGNORED = ("out", "overwrite", "wandb", "wandb_project", "log_interval", "timeout")
"""Settings that name where a run goes, not what it does."""


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder, replacing an earlier one, and return its path.

    A run that was killed has no ``summary.json``; its figures are then computed from the records, and the report says
    so. An arm without a file counts as one without records. UserError: no run folder, or it cannot be written.
    """
    run = load(Path(run_dir))
    return strict_json.write_text(run.path / "report.html", render.html(*make_chapters([run])))


def write_reports(paths: Sequence[Path], out: Path, *, png: bool = False, lead: Part | None = None) -> list[Path]:
    """Write ``report.html`` and ``report.md`` about run folders, or folders of them, into ``out``; returns the files.

    ``png``: also every figure as ``figures/NAME.png``, shown in ``report.md``; needs kaleido and a browser. ``lead`` is
    shown before everything else. UserError: no run folder, ``out`` cannot be written, or no PNG can be made here.
    """
    chapters, title = make_chapters(load_all(paths))
    if lead is not None:
        chapters[0] = replace(chapters[0], parts=[lead, *chapters[0].parts])
    page = strict_json.write_text(out / "report.html", render.html(chapters, title))
    pictures = render.write_pictures(chapters, out) if png else {}
    text = strict_json.write_text(out / "report.md", render.markdown(chapters, pictures))
    return [page, text, *(out / name for name in pictures.values())]


def make_chapters(runs: Sequence[Run]) -> tuple[list[Chapter], str]:
    """The chapters about these runs, and a title for the whole."""
    runs = with_pairs(runs)
    makers = {"operators": benchmarks.operators_chapter, "layers": benchmarks.layers_chapter}
    makers["inference"] = inference.inference_chapter
    chapters = [makers.get(run.kind, training.chapter)(run, f"run{number}") for number, run in enumerate(runs, 1)]
    if len(runs) == 1:
        return chapters, f"{chapters[0].title}: {chapters[0].verdict}"
    chapters.insert(0, _overview(runs))
    return chapters, chapters[0].title


def _overview(runs: Sequence[Run]) -> Chapter:
    """Verdicts, step times and speed-ups in tables, and what differs between the runs."""
    trained = [run for run in runs if run.kind == "training"]
    parts = [Part("runs", "Runs", table=Table([(run.name, run.verdict) for run in runs]))]
    if notes := [
        ("", f"{first.name} and {second.name} {apart}: do not compare them.")
        for first, second in combinations(trained, 2)
        if (apart := why_apart(first, second))
        and (different_models(first, second) or {first.only_arm, second.only_arm} == set(ARMS))
    ]:
        parts.append(Part("notes", "Notes", table=Table(notes)))
    if trained:
        head = ("run", "baseline, ms", "flux, ms", "speed-up", "largest loss difference", "peak memory")
        parts.append(Part("overview", "Training runs", table=Table([*map(_row, trained)], head)))
    if len(trained) > 1:
        table = _differences(trained)
        caption = "" if table else "None: the runs were asked for the same, on the same devices and versions."
        parts.append(Part("differences", "Settings that differ", caption=caption, table=table))
    kinds = {"training": "training run", "operators": "operator benchmark", "layers": "layer benchmark"}
    kinds |= {"inference": "inference benchmark"}
    counts = Counter(run.kind for run in runs)
    title = ", ".join(counted(counts[kind], noun) for kind, noun in kinds.items() if counts[kind])
    return Chapter("all", title, title, "megatron-flux", parts)


def _row(run: Run) -> tuple[str, ...]:
    summary, arms = run.summary, run.summary["arms"]
    interval = summary["speedup_ci95"]
    return (
        run.name,
        *(shown(arms[arm]["step_time_ms"]["median"], milliseconds) for arm in ARMS),
        shown(summary["speedup"], "{:.3f}".format) + (f" ({interval[0]:.3f}…{interval[1]:.3f})" if interval else ""),
        relative(summary["max_relative_loss_difference"]),
        shown(arms["flux"]["peak_memory_bytes"] or arms["baseline"]["peak_memory_bytes"], memory),
    )


def _differences(runs: Sequence[Run]) -> Table | None:
    """The settings that are not the same in all runs; None when there are none."""
    every = []
    for run in runs:
        asked = {name: value for name, value in without_secrets(run.settings).items() if name not in _IGNORED}
        found = {name: run.summary.get(name) or run.config.get(name) for name in ("device", "link", "versions")}
        every.append(dict(flat(asked | {name: value for name, value in found.items() if value})))
    rows = [
        (name, *(one.get(name, UNKNOWN) or UNKNOWN for one in every))
        for name in dict.fromkeys(name for one in every for name in one)
        if len({one.get(name) for one in every}) > 1
    ]
    return Table(rows, head=("setting", *(run.name for run in runs))) if rows else None
