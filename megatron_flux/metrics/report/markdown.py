"""Chapters as Markdown for a pull request: verdicts, tables, captions, and the figures that were written as PNG."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_flux.metrics.report.parts import Chapter, Part, Table

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#&~])")


def text(chapters: Sequence[Chapter], figures: Mapping[str, str]) -> str:
    """The document.

    Args:
        chapters: what to show.
        figures: relative path of the picture by ``<chapter>-<part>``; other figures are left to the page.
    """
    lines: list[str] = []
    for level, chapter in enumerate(chapters):
        heading = "#" if level == 0 else "##"
        title = chapter.verdict if level == 0 else f"{chapter.title}: {chapter.verdict}"
        lines += [f"{heading} {escaped(title)}", "", escaped(chapter.subtitle), ""]
        for part in chapter.parts:
            if not part.folded:
                lines += _part(part, f"{heading}#", figures.get(f"{chapter.id}-{part.id}"))
    return "\n".join(lines).rstrip() + "\n"


def _part(part: Part, heading: str, picture: str | None) -> list[str]:
    drawn = part.figure is not None and picture is not None
    if part.figure is not None and not drawn and part.table is None:
        return []  # its caption would explain a picture that is not here
    lines = [f"{heading} {escaped(part.title)}", ""]
    if drawn:
        lines += [f"![{escaped(part.title)}]({picture})", ""]
    if part.caption:
        lines += [escaped(part.caption), ""]
    if part.table is not None and any(row[0] for row in part.table.rows):
        lines += [*_table(part.table), ""]
    elif part.table is not None:
        lines += [line for row in part.table.rows for line in (escaped(row[1]), "")]
    return lines


def _table(table: Table) -> list[str]:
    columns = max((len(row) for row in table.rows), default=len(table.head))
    head = list(table.head) or [""] * columns
    rule = ["---"] + (["---:"] if table.head else ["---"]) * (columns - 1)
    return [_row(head), "| " + " | ".join(rule) + " |", *(_row(row) for row in table.rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def escaped(text: str) -> str:
    """Text that Markdown, and the HTML it may hold, shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))
