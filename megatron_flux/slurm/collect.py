"""All repetitions of a job: a report for each, and their figures side by side.

Repetitions are whole comparisons of their own, so the spread of their speed-ups is what another run of the job may
show; the interval within one repetition is only about its own blocks.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics import ARMS, read_records, strict_json, summarize, write_report, write_summary
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import read_summary
from megatron_flux.metrics.table import UNKNOWN, milliseconds, relative
from megatron_flux.run.folder import CONFIG
from megatron_flux.slurm import status

_COLUMNS = "run | state | starts | baseline, ms | flux, ms | speed-up | 95 % interval | loss difference | report"


def collect(root: Path) -> dict[str, Any]:
    """Write each repetition's report, and ``collected.json`` and ``collected.md`` of all.

    Returns:
        What ``collected.json`` holds: ``name``, ``job``, ``repetitions`` (index, state, and of each arm the median step
        time; speed-up, its interval, loss difference and report of a comparison), and over the finished comparisons
        ``speedup_median``, ``speedup_min``, ``speedup_max``, null where there is none.

    Raises:
        UserError: ``root`` is no folder of a job, or no repetition has recorded anything.
    """
    name, job = status.split(root)
    found = [_one(repetition) for repetition in status.repetitions(root) if any(repetition.iterations.values())]
    if not found:
        raise UserError(f"{root} has no records yet; see the logs in {root}/rep-*/logs")
    speedups = [one["speedup"] for one in found if one["speedup"] is not None and one["state"] == "finished"]
    collected = {
        "name": name,
        "job": job,
        "repetitions": found,
        "speedup_median": statistics.median(speedups) if speedups else None,
        "speedup_min": min(speedups, default=None),
        "speedup_max": max(speedups, default=None),
    }
    try:
        strict_json.write_atomically(root / "collected.json", strict_json.dumps(collected, indent=2) + "\n")
        strict_json.write_atomically(root / "collected.md", table(collected))
    except OSError as error:
        raise UserError(f"{root} cannot be written: {error.strerror}") from None
    return json.loads(strict_json.dumps(collected))


def _one(repetition: status.Repetition) -> dict[str, Any]:
    run = repetition.run
    records = {arm: read_records(file) if (file := run / arm / "metrics.jsonl").is_file() else [] for arm in ARMS}
    if (run / "summary.json").is_file() and repetition.state == "finished":
        summary = read_summary(run / "summary.json")
    else:
        summary = summarize(records["baseline"], records["flux"], read_json_object(run / CONFIG))
        if repetition.state == "finished":
            write_summary(run / "summary.json", summary)
    both = all(records.values())
    return {
        "index": repetition.index,
        "state": repetition.state,
        "starts": repetition.starts,
        "iterations": repetition.iterations,
        "step_time_ms": {arm: summary["arms"][arm]["step_time_ms"]["median"] for arm in ARMS},
        "final_loss": {arm: summary["arms"][arm]["final_loss"] for arm in ARMS},
        "speedup": summary["speedup"],
        "speedup_ci95": summary["speedup_ci95"],
        "max_relative_loss_difference": summary["max_relative_loss_difference"] if both else None,
        "flux_active_layers": summary["flux_active_layers"],
        "flux_fallbacks": summary["flux_fallbacks"],
        "link": read_json_object(run / CONFIG).get("link"),
        "report": str(write_report(run).relative_to(repetition.folder.parent)),
    }


def table(collected: dict[str, Any]) -> str:
    """``collected.md``: one line per repetition."""
    lines = [f"# {collected['name']}, job {collected['job']}", "", f"| {_COLUMNS} |"]
    lines.append(f"| {' | '.join('---' for _ in _COLUMNS.split(' | '))} |")
    for one in collected["repetitions"]:
        times = [
            UNKNOWN if one["step_time_ms"][arm] is None else milliseconds(one["step_time_ms"][arm]) for arm in ARMS
        ]
        speedup = UNKNOWN if one["speedup"] is None else f"{one['speedup']:.3f}"
        interval = UNKNOWN if one["speedup_ci95"] is None else "…".join(f"{end:.3f}" for end in one["speedup_ci95"])
        cells = [one["index"], one["state"], str(one["starts"]), *times, speedup, interval]
        cells += [relative(one["max_relative_loss_difference"]), f"[{one['report']}]({one['report']})"]
        lines.append(f"| {' | '.join(cells)} |")
    if collected["speedup_median"] is not None:
        lines += [
            "",
            f"Speed-up of the finished repetitions: median {collected['speedup_median']:.3f} "
            f"({collected['speedup_min']:.3f}…{collected['speedup_max']:.3f}).",
        ]
    return "\n".join(lines) + "\n"
