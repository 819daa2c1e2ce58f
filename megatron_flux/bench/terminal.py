"""Wide tables for the terminal; the same text, without colour, when it goes to a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def print_table(
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str,
    notes: Sequence[str] = (),
    last: str = "",
    file: IO[str] | None = None,
) -> None:
    """Print ``rows`` under ``title``, each on one line however narrow the terminal: no figure is cut or folded.

    Args:
        left: names of the first columns, aligned left.
        right: names of the next columns, aligned right.
        rows: cells, as many as there are columns.
        title: the line above.
        notes: lines below.
        last: name of one more column, aligned left; none if empty.
        file: where to; standard output by default.
    """
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    unicode = console.encoding.lower().startswith("utf")
    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    if last:
        table.add_column(last, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, wide)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def milliseconds(value: float | None) -> str:
    """Three decimals, as timing resolves; ``-`` where there is none."""
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """Whole per cent; ``-`` where there is none."""
    return "-" if value is None else f"{value:.0%}"
