"""Render a report: chapters of parts, as one HTML page that loads nothing.

plotly.js is inside the page once, and a content security policy forbids every request: a page that needs the network
would be broken for everybody. Text from a run is escaped; the figures' JSON lies in a data block in which ``<``, ``>``
and ``&`` are escaped, and is parsed, never run.

Colours are CSS variables. Blue and vermilion of Okabe and Ito for baseline and flux are told apart with every common
colour vision. Nothing is shown by colour alone: lines differ in width, points in shape, bars have a legend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_flux.metrics.strict_json import without_secrets

Figure = dict[str, Any]
"""A plotly figure as plain JSON; its colours are ``var(--NAME)`` of the palette."""

_COLOURS = {  # on light, on dark
    "page": ("#ffffff", "#16181b"),
    "text": ("#1a1a1a", "#e8e8e8"),
    "quiet": ("#595959", "#a6a6a6"),
    "line": ("#d9d9d9", "#3a3d42"),
    "baseline": ("#0072b2", "#56b4e9"),
    "flux": ("#d55e00", "#f0984a"),
    "other": ("#7a7a7a", "#9a9a9a"),
    "part-gemm": ("#3a6ea5", "#5b8fc7"),
    "part-fused": ("#e08a3c", "#f0984a"),
    "part-attention": ("#7db3d8", "#a5cfeb"),
    "part-norm": ("#8a6bb0", "#a98ed0"),
    "part-optimizer": ("#4f9d69", "#6fc08a"),
    "part-other": ("#b9b9b9", "#85898f"),
    "part-communication_exposed": ("#c0392b", "#ff6b5b"),
    "part-idle": ("#e6e6e6", "#3f4349"),
}
LIGHT, DARK = ({name: pair[index] for name, pair in _COLOURS.items()} for index in (0, 1))


class Table(NamedTuple):
    """Cells as text. With a head the first column names the row and the others are figures; without, pairs."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


@dataclass(frozen=True)
class Part:
    """One section: a figure, a table, or both; the caption says why something is missing."""

    id: str
    title: str
    figure: Figure | None = None
    caption: str = ""
    table: Table | None = None
    folded: bool = False
    """Closed until the reader opens it."""


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


def settings_parts(settings: Mapping[str, Any]) -> list[Part]:
    """Return a folded part for each of these settings that is known, without secrets."""
    parts = []
    for name, value in settings.items():
        pairs = list(flat(without_secrets(value if isinstance(value, Mapping) else {"": value}))) if value else []
        if pairs:
            parts.append(Part(name, name.capitalize(), table=Table(pairs), folded=name != "command"))
    return parts


def html(chapters: Sequence[Chapter], title: str) -> str:
    """Return the page; ``title`` is shown by the browser."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("megatron_flux.metrics"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    figures = {f"{chapter.id}-{part.id}": part.figure for chapter in chapters for part in chapter.parts if part.figure}
    return environment.get_template("report.html.j2").render(
        chapters=chapters,
        title=title,
        figures=figures,
        plotlyjs=get_plotlyjs() if figures else "",
        light=LIGHT,
        dark=DARK,
    )
