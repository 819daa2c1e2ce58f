"""What a report is made of, and chapters as HTML, as Markdown for a pull request, and their figures as PNG files.

The page needs nothing but itself: plotly.js is inside once, and a content security policy forbids every request, so a
page that needs the network would be broken for everybody. Whatever a run holds is text: autoescaped in HTML; the
figures' JSON lies in a data block in which ``<``, ``>`` and ``&`` are escaped and is parsed, never run.

Colours are CSS variables of the page, and the light ones again for PNG figures. Blue and vermilion of Okabe and Ito for
the arms are told apart with every common colour vision; parts of a bar, neighbours in a stack, alternate in lightness
too. Nothing is shown by colour alone: lines differ in width, points in shape, bars have a legend in their order.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_flux.errors import UserError, one_line, require
from megatron_flux.metrics.report import terms
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
PALETTES = {"light": LIGHT, "dark": DARK, "print": {**LIGHT, "text": "#000000", "quiet": "#404040", "line": "#bfbfbf"}}

PNG = {"format": "png", "width": 900, "scale": 2}
PNG_TIMEOUT_S = 120

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#&~])")
_COLOUR = re.compile(r"var\(--([\w-]+)\)")


class Table(NamedTuple):
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
    folds: Sequence[tuple[str, Table, bool]] = ()
    """Tables behind a line each, and whether they are open: on a page, left out of Markdown."""

    @property
    def words(self) -> list[str]:
        """What may hold terms: the title, the head and the names of rows; not of settings."""
        tables = [self.table, *(table for _, table, _ in self.folds[:1])] if not self.folded else []
        names = [name for table in tables if table for name in (*table.head, *(row[0] for row in table.rows))]
        return [self.title, *names]


@dataclass(frozen=True)
class Chapter:
    """Everything about one run, or about all of them."""

    id: str
    title: str
    verdict: str
    subtitle: str
    parts: Sequence[Part]


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


def settings_parts(settings: Mapping[str, Any]) -> list[Part]:
    """A part for each of these settings that is known, without secrets."""
    parts = []
    for name, value in settings.items():
        pairs = list(flat(without_secrets(value if isinstance(value, Mapping) else {"": value}))) if value else []
        if pairs:
            parts.append(Part(name, name.capitalize(), table=Table(pairs), folded=name != "command"))
    return parts


def _figures(chapters: Sequence[Chapter]) -> dict[str, Figure]:
    """Every figure by ``<chapter>-<part>``."""
    return {f"{chapter.id}-{part.id}": part.figure for chapter in chapters for part in chapter.parts if part.figure}


def html(chapters: Sequence[Chapter], title: str) -> str:
    """The page. ``title`` is shown by the browser."""
    from plotly.offline import get_plotlyjs

    figures = _figures(chapters)
    known: set[str] = set()
    explained = {}
    for chapter in chapters:
        explained[chapter.id] = terms.first_here([chapter.subtitle], known)
        for part in chapter.parts:
            explained[f"{chapter.id}-{part.id}"] = terms.first_here(part.words, known)
    values = {"figures": figures, "plotlyjs": get_plotlyjs() if figures else "", "palettes": PALETTES}
    values |= {"terms": explained}
    return _rendered("report.html.j2", title=title, chapters=chapters, **values)


def markdown(chapters: Sequence[Chapter], pictures: Mapping[str, str]) -> str:
    """The document; ``pictures`` is the path of a figure's PNG by ``<chapter>-<part>``: others are left to the page."""
    return _rendered("report.md.j2", chapters=chapters, pictures=pictures).rstrip() + "\n"


def _rendered(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    loader = PackageLoader("megatron_flux.metrics")
    environment = Environment(loader=loader, autoescape=template.endswith(".html.j2"), **options)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters |= {"md": escaped, "terms": terms.split}
    return environment.get_template(template).render(values)


def escaped(text: str) -> str:
    """Text that Markdown, and the HTML it may hold, shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def write_pictures(chapters: Sequence[Chapter], out: Path) -> dict[str, str]:
    """Write every figure to ``out/figures`` and return its path relative to ``out`` by ``<chapter>-<part>``.

    kaleido draws them in a headless Chrome or Chromium; UserError where one is missing, or drawing failed.
    """
    require("kaleido", "--png")
    instead = "leave out --png: report.html has the figures and needs neither"
    import kaleido
    import plotly.graph_objects as go
    from choreographer.errors import ChromeNotFoundError

    pictures, jobs = {}, []
    for name, figure in _figures(chapters).items():
        pictures[name] = f"figures/{name}.png"
        options = {**PNG, "height": figure["layout"]["height"]}
        jobs.append({"fig": go.Figure(painted(figure, LIGHT)), "path": out / pictures[name], "opts": options})
    logging.getLogger("kaleido").setLevel(logging.WARNING)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        # mathjax off: it would be asked for over the network.
        kaleido.write_fig_from_object_sync(jobs, kopts={"mathjax": False, "timeout": PNG_TIMEOUT_S, "n": 1})
    except ChromeNotFoundError:
        raise UserError(
            f"PNG figures need Chrome or Chromium, and none was found; install one (Debian: apt-get install chromium) "
            f"or name it in BROWSER_PATH, or {instead}"
        ) from None
    except Exception as error:
        raise UserError(f"PNG figures could not be drawn ({one_line(error)}); {instead}") from error
    for path in pictures.values():
        if not (out / path).is_file():
            raise UserError(f"PNG figures could not be drawn (no {path}); {instead}")
    return pictures


def painted(figure: Figure, palette: Mapping[str, str]) -> Figure:
    """A figure with its colours filled in; the page's script does the same when the reader's scheme changes."""
    return json.loads(_COLOUR.sub(lambda found: palette.get(found[1], found[0]), json.dumps(figure)))
