"""The summary as a table for the terminal; the same text, without colour, when it goes to a file or a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_flux.metrics.rows import MINUS, UNKNOWN, findings, rows
from megatron_flux.metrics.verdict import verdict

PIPED_WIDTH = 100
"""Wider than the table ever is: rich would lay out for 80 columns, or for COLUMNS, and fold cells."""

_ASCII = str.maketrans({"…": "~", UNKNOWN: "-", MINUS: "-"})


def print_summary(summary: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print table, findings and verdict.

    Args:
        summary: a dict of :func:`megatron_flux.metrics.summary.summarize`.
        file: where to; standard output by default.
    """
    console = Console(file=file, highlight=False, emoji=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, emoji=False, color_system=None, width=PIPED_WIDTH)
    unicode = console.encoding.lower().startswith("utf")

    def cell(text: str, style: str = "") -> Text:
        # Text, never a str: reasons come from elsewhere and may hold what rich takes for markup.
        return Text(text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode(), style=style)

    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("baseline", "flux", "difference"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows(summary):
        table.add_row(cell(row.label), cell(row.baseline), cell(row.flux), cell(row.difference))
    console.print(table)
    for label, text in findings(summary):
        style = "yellow" if label == "note" else ""
        # soft_wrap: a long reason stays one line for grep; a terminal wraps it itself.
        console.print(cell(f"{label}: {text}", style), soft_wrap=True)
    console.print(cell(verdict(summary), "bold"), soft_wrap=True)
