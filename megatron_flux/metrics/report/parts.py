"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_flux.metrics.strict_json import without_secrets

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
    """One section: a figure, a table, or both; what is missing is explained in the caption instead of drawn empty."""

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
    parts: Sequence[Part]


def figures_of(chapters: Sequence[Chapter]) -> dict[str, Figure]:
    """Every figure by ``<chapter>-<part>``."""
    every = ((f"{chapter.id}-{part.id}", part.figure) for chapter in chapters for part in chapter.parts)
    return {name: figure for name, figure in every if figure is not None}


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as ``(dotted name, text)``; lists stay on one line."""
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping) and item:
            yield from flat(item, name)
        elif isinstance(item, list):
            yield name, ", ".join(str(part) for part in item)
        else:
            yield name, "" if item is None else str(item)


def settings_part(name: str, value: Any, *, folded: bool = True) -> list[Part]:
    """Settings as a part, without secrets; none where there are none."""
    if not value:
        return []
    pairs = list(flat(without_secrets(value if isinstance(value, Mapping) else {"": value})))
    return [Part(name, name.capitalize(), table=Table(pairs), folded=folded)] if pairs else []
