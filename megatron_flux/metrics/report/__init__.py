"""Reports of run folders: ``report.html``, one page that needs nothing but itself, ``report.md`` and PNG figures.

A report is chapters of parts (:mod:`megatron_flux.metrics.report.parts`), made once from the records and then written
as HTML or Markdown. What is missing or damaged in a run is said in its chapter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_flux.errors import UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.report.parts import Chapter, Part, Table
from megatron_flux.metrics.report.run import Run, load, load_all


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder, replacing an earlier one, and return its path.

    A run that was killed has no ``summary.json``; its figures are then computed from the records, and the report says
    so. An arm without a file counts as one without records.

    Raises:
        UserError: this is no run folder, or the page cannot be written.
    """
    run = load(Path(run_dir))
    return _write(run.path / "report.html", _html([run]))


def write_reports(
    paths: Sequence[Path], out: Path, *, png: bool = False, check: Table | None = None, verdict: str = ""
) -> list[Path]:
    """Write ``report.html`` and ``report.md`` about one or several run folders into ``out``.

    Args:
        paths: run folders, or folders of run folders.
        out: where to; made when missing.
        png: also write every figure as ``figures/NAME.png`` and show it in ``report.md``; needs kaleido and a browser.
        check: the table of a comparison with earlier results, shown first.
        verdict: its verdict.

    Returns:
        What was written, ``report.html`` first.

    Raises:
        UserError: a path is no run folder, ``out`` cannot be written, or PNG figures cannot be made here.
    """
    from megatron_flux.metrics.report import markdown

    chapters, title = make_chapters(load_all(paths))
    if check is not None:
        chapters[0] = _with_check(chapters[0], check, verdict)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; choose a folder that can be written") from error
    written = [_write(out / "report.html", _render(chapters, title))]
    figures: dict[str, str] = {}
    if png:
        from megatron_flux.metrics.report.png import write_figures

        figures = write_figures(chapters, out)
    written.append(_write(out / "report.md", markdown.text(chapters, figures)))
    return [*written, *(out / name for name in figures.values())]


def _with_check(chapter: Chapter, check: Table, verdict: str) -> Chapter:
    part = Part("against", "Against earlier results", caption=verdict, table=check)
    return Chapter(chapter.id, chapter.title, chapter.verdict, chapter.subtitle, [part, *chapter.parts])


def _html(runs: Sequence[Run]) -> str:
    return _render(*make_chapters(runs))


def _render(chapters: Sequence[Chapter], title: str) -> str:
    from megatron_flux.metrics.report import html

    return html.text(chapters, title)


def make_chapters(runs: Sequence[Run]) -> tuple[list[Chapter], str]:
    """The chapters about these runs, and a title for the whole."""
    from megatron_flux.metrics.report import benchmarks, several, training

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


def _write(path: Path, text: str) -> Path:
    try:
        strict_json.write_atomically(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that can be written") from error
    return path
