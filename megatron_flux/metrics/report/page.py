"""Render a report: chapters of parts, as one HTML page that loads nothing.

plotly.js is inside the page once, and a content security policy forbids every request. Text from a run is escaped; the
figures' JSON lies in a data block in which ``<``, ``>`` and ``&`` are escaped, and is parsed, never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Part:
    """One section: a figure, a table, or both; the caption says why something is missing."""

    id: str
    title: str
    figure: Figure | None = None
    caption: str = ""
    rows: Sequence[Sequence[str]] = ()
    """Of a table. With a head their first column names the row and the others are figures; without, they are pairs."""
    head: Sequence[str] = ()
    folded: bool = False  # closed until the reader opens it


@dataclass(frozen=True)
class Chapter:
    """Everything about one run, or about all of them."""

    id: str
    title: str
    verdict: str
    subtitle: str
    parts: Sequence[Part]


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as ``(dotted name, text)``; lists stay on one line."""
    for key, item in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping) and item:
            yield from flat(item, name)
        elif isinstance(item, list):
            yield name, ", ".join(str(part) for part in item)
        else:
            yield name, "" if item is None else str(item)


def html(chapters: Sequence[Chapter], title: str) -> str:
    """Return the page; ``title`` is shown by the browser."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.io import templates
    from plotly.offline import get_plotlyjs

    how: Any = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=PackageLoader("megatron_flux.metrics"), autoescape=True, **how)
    figures = {
        f"{chapter.id}-{part.id}": json.loads(part.figure.to_json())  # null for what is not finite
        for chapter in chapters
        for part in chapter.parts
        if part.figure is not None
    }
    return environment.get_template("report.html.j2").render(
        chapters=chapters,
        title=title,
        figures=figures,
        templates={name: templates[f"plotly_{name}"].to_plotly_json() for name in ("white", "dark")},
        plotlyjs=get_plotlyjs() if figures else "",
    )
