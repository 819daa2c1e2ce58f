"""Report run folders as ``report.html``, one page that needs nothing but itself.

A report is chapters of parts, made from the records. What is missing or damaged in a run is explained in its chapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.report import page, training
from megatron_flux.metrics.report.page import Chapter, Part
from megatron_flux.metrics.report.run import Run, differences, load_all
from megatron_flux.metrics.summary import VARIANTS
from megatron_flux.metrics.table import counted, memory, relative, short, shown


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write ``report.html`` about run folders, or folders of them, into ``out``; return its path.

    Without ``summary.json``, after a kill, figures are computed from the records. Raises UserError.
    """
    return strict_json.write_text(out / "report.html", page.html(*make_chapters(load_all(paths))))


def make_chapters(runs: Sequence[Run]) -> tuple[list[Chapter], str]:
    """Return the chapters about these runs, and a title for the whole."""
    chapters = [training.chapter(run, f"run{number}") for number, run in enumerate(runs, 1)]
    if len(runs) == 1:
        return chapters, f"{chapters[0].title}: {chapters[0].verdict}"
    chapters.insert(0, _overview(runs))
    return chapters, chapters[0].title


def _overview(runs: Sequence[Run]) -> Chapter:
    head: tuple[str, ...] = ("run", "verdict", "baseline, ms", "flux, ms", "largest loss difference", "peak memory")
    parts = [Part("overview", "Training runs", rows=[*map(_row, runs)], head=head)]
    rows = [(name, *values) for name, values in differences(runs).items()]
    caption = "" if rows else "None: the same was requested, on the same devices and versions."
    head = ("setting", *(run.name for run in runs))
    parts.append(Part("differences", "Settings that differ", caption=caption, rows=rows, head=head))
    title = counted(len(runs), "run")
    return Chapter("all", title, title, "megatron-flux", parts)


def _row(run: Run) -> tuple[str, ...]:
    variants = run.summary["arms"]
    return (
        run.name,
        run.verdict,
        *(shown(variants[variant]["step_time_ms"]["median"], short) for variant in VARIANTS),
        relative(run.summary["max_relative_loss_difference"]),
        shown(variants["flux"]["peak_memory_bytes"] or variants["baseline"]["peak_memory_bytes"], memory),
    )
