"""The summary as a table for the terminal; the same text, without colour, when it goes to a file or a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_flux.metrics.rows import MINUS, UNKNOWN, findings, rows
from megatron_flux.metrics.verdict import verdict

PIPED_WIDTH = 140
"""Wider than a table ever is: rich would lay out for 80 columns, or for COLUMNS, and fold cells."""

_ASCII = str.maketrans({"…": "~", UNKNOWN: "-", MINUS: "-"})


def print_summary(summary: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print table, findings and verdict.

    Args:
        summary: a dict of :func:`megatron_flux.metrics.summary.summarize`.
        file: where to; standard output by default.
    """
    printer = _Printer(file)
    cells = [(row.label, row.baseline, row.flux, row.difference) for row in rows(summary)]
    printer.table(("", "baseline", "flux", "difference"), cells)
    for label, text in findings(summary):
        printer.line(f"{label}: {text}", "yellow" if label == "note" else "")
    printer.line(verdict(summary), "bold")


def print_table(
    head: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    notes: Sequence[str] = (),
    last: str = "",
    file: IO[str] | None = None,
) -> None:
    """Print a table, notes below it, and a last line in bold."""
    printer = _Printer(file)
    printer.table(head, cells)
    for note in notes:
        printer.line(f"note: {note}", "yellow")
    if last:
        printer.line(last, "bold")


class _Printer:
    """A console that writes the same text to a terminal and to a pipe, in ASCII where nothing else can be shown."""

    def __init__(self, file: IO[str] | None) -> None:
        self._console = Console(file=file, highlight=False, emoji=False)
        if not self._console.is_terminal:
            self._console = Console(file=file, highlight=False, emoji=False, color_system=None, width=PIPED_WIDTH)
        self._unicode = self._console.encoding.lower().startswith("utf")

    def _text(self, text: str, style: str = "") -> Text:
        # Text, never a str: reasons come from elsewhere and may hold what rich takes for markup.
        shown = text if self._unicode else text.translate(_ASCII).encode("ascii", "replace").decode()
        return Text(shown, style=style)

    def table(self, head: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        table = Table(box=box.SIMPLE_HEAD if self._unicode else box.ASCII2, pad_edge=False)
        for index, name in enumerate(head):
            table.add_column(name, justify="right" if index else "left", overflow="fold")
        for row in cells:
            table.add_row(*(self._text(cell) for cell in row))
        self._console.print(table)

    def line(self, text: str, style: str = "") -> None:
        # soft_wrap: a long reason stays one line for grep; a terminal wraps it itself.
        self._console.print(self._text(text, style), soft_wrap=True)
