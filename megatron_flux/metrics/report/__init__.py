"""Reports of run folders: ``report.html``, one page that needs nothing but itself, ``report.md`` and PNG figures.

A report is chapters of parts, made once from the records and then written in every form. What is missing or damaged in
a run is explained in its chapter. To be read in this order: ``parts`` (what a report is made of), ``run`` (a folder as
the report sees it), ``figures``, the chapters ``training`` with its ``samples``, ``benchmarks`` and ``several``,
``render`` (HTML, Markdown, PNG).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_flux.errors import UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.report import benchmarks, render, several, training
from megatron_flux.metrics.report.parts import Chapter, Part
from megatron_flux.metrics.report.run import Run, load, load_all


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder, replacing an earlier one, and return its path.

    A run that was killed has no ``summary.json``; its figures are then computed from the records, and the report says
    so. An arm without a file counts as one without records.

    Raises:
        UserError: this is no run folder, or the page cannot be written.
    """
    run = load(Path(run_dir))
    return strict_json.write_text(run.path / "report.html", render.html(*make_chapters([run])))


def write_reports(paths: Sequence[Path], out: Path, *, png: bool = False, lead: Part | None = None) -> list[Path]:
    """Write ``report.html`` and ``report.md`` about one or several run folders into ``out``.

    Args:
        paths: run folders, or folders of run folders.
        out: where to; made when missing.
        png: also write every figure as ``figures/NAME.png`` and show it in ``report.md``; needs kaleido and a browser.
        lead: shown before everything else.

    Returns:
        What was written, ``report.html`` first.

    Raises:
        UserError: a path is no run folder, ``out`` cannot be written, or PNG figures cannot be made here.
    """
    chapters, title = make_chapters(load_all(paths))
    if lead is not None:
        chapters[0] = replace(chapters[0], parts=[lead, *chapters[0].parts])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; choose a folder that can be written") from error
    page = strict_json.write_text(out / "report.html", render.html(chapters, title))
    pictures = render.write_pictures(chapters, out) if png else {}
    text = strict_json.write_text(out / "report.md", render.markdown(chapters, pictures))
    return [page, text, *(out / name for name in pictures.values())]


def make_chapters(runs: Sequence[Run]) -> tuple[list[Chapter], str]:
    """The chapters about these runs, and a title for the whole."""
    makers = {
        "training": training.chapter,
        "operators": benchmarks.operators_chapter,
        "layers": benchmarks.layers_chapter,
    }
    runs, notes = several.with_pairs(runs)
    chapters = [makers[run.kind](run, f"run{number}") for number, run in enumerate(runs, 1)]
    if len(runs) > 1:
        chapters.insert(0, several.chapter(runs, notes))
    first = chapters[0]
    return chapters, f"{first.title}: {first.verdict}" if len(runs) == 1 else first.title
