"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Figure = dict[str, Any]
"""A plotly figure as plain JSON; a trace's colour is a name of the palette in its ``meta.colour``."""


NOT_RECORDED = "Not recorded"
"""How the caption of a part begins whose data the run does not have."""


@dataclass(frozen=True)
class Table:
    """Cells as text. With a head the first column names the row and the others are figures; without, pairs."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """One section: a figure, a table, or both; what is missing is said in the caption instead of drawn empty."""

    id: str
    title: str
    figure: Figure | None = None
    caption: str = ""
    table: Table | None = None
    folded: bool = False
    """For those who look for it: closed on a page, left out of Markdown."""


@dataclass(frozen=True)
class Chapter:
    """Everything about one run, or about all of them."""

    id: str
    title: str
    verdict: str
    subtitle: str
    parts: Sequence[Part] = field(default_factory=tuple)
