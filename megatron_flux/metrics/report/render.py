"""Chapters as one HTML page that needs nothing but itself, as Markdown for a pull request, and figures as PNG files.

plotly.js is inside the page once, and a content security policy forbids every request, so a page that needs the network
would be broken for everybody, not only for those without one. Whatever a run holds is text: autoescaped in HTML; the
figures' JSON lies in a data block in which ``<``, ``>`` and ``&`` are escaped and is parsed, never run.

The palette is named: CSS variables of the page, and the light one again for PNG figures. Blue and vermilion of Okabe
and Ito for the arms are told apart with every common colour vision; their siblings on dark are lighter. The parts of a
bar (``part-*``) are neighbours in a stack, so they alternate in lightness too. No figure tells anything by colour
alone: lines differ in width, points in shape, bars have a legend in their order and a table beside them.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_flux.errors import UserError
from megatron_flux.metrics.report.parts import Chapter, Figure, Part, Table, figures_of

if TYPE_CHECKING:
    from jinja2 import Template

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
    "part-rest": ("#b9b9b9", "#85898f"),
    "part-exposed": ("#c0392b", "#ff6b5b"),
    "part-idle": ("#e6e6e6", "#3f4349"),
}
LIGHT = {name: light for name, (light, _) in _COLOURS.items()}
DARK = {name: dark for name, (_, dark) in _COLOURS.items()}
PRINT = {**LIGHT, "text": "#000000", "quiet": "#404040", "line": "#bfbfbf"}

PNG = {"format": "png", "width": 900, "scale": 2}
PNG_TIMEOUT_S = 120

_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#&~])")


def html(chapters: Sequence[Chapter], title: str) -> str:
    """The page. ``title`` is shown by the browser."""
    from plotly.offline import get_plotlyjs

    figures = figures_of(chapters)
    return _page_template().render(
        title=title,
        chapters=chapters,
        palettes={"light": LIGHT, "dark": DARK, "print": PRINT},
        figures_json=script_json(figures),
        plotlyjs=get_plotlyjs() if figures else "",
    )


@functools.cache
def _page_template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("megatron_flux.metrics")
    options = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    return Environment(loader=loader, autoescape=True, **options).get_template("report.html.j2")


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def markdown(chapters: Sequence[Chapter], pictures: Mapping[str, str]) -> str:
    """The document.

    Args:
        chapters: what to show.
        pictures: relative path of a figure's PNG by ``<chapter>-<part>``; other figures are left to the page.
    """
    lines: list[str] = []
    for chapter in chapters:
        heading = "##" if lines else "#"
        title = f"{chapter.title}: {chapter.verdict}" if lines else chapter.verdict
        lines += [f"{heading} {escaped(title)}", "", escaped(chapter.subtitle), ""]
        for part in chapter.parts:
            if not part.folded:
                lines += _markdown_part(part, f"{heading}#", pictures.get(f"{chapter.id}-{part.id}"))
    return "\n".join(lines).rstrip() + "\n"


def _markdown_part(part: Part, heading: str, picture: str | None) -> list[str]:
    drawn = part.figure is not None and picture is not None
    if part.figure is not None and not drawn and part.table is None:
        return []  # its caption would explain a picture that is not here
    lines = [f"{heading} {escaped(part.title)}", ""]
    if drawn:
        lines += [f"![{escaped(part.title)}]({picture})", ""]
    if part.caption:
        lines += [escaped(part.caption), ""]
    if part.table is not None and any(row[0] for row in part.table.rows):
        lines += [*_markdown_table(part.table), ""]
    elif part.table is not None:
        lines += [line for row in part.table.rows for line in (escaped(row[1]), "")]
    return lines


def _markdown_table(table: Table) -> list[str]:
    columns = max((len(row) for row in table.rows), default=len(table.head))
    head = list(table.head) or [""] * columns
    rule = ["---"] + (["---:"] if table.head else ["---"]) * (columns - 1)
    first, *others = ([escaped(cell) for cell in row] for row in (head, *table.rows))
    return ["| " + " | ".join(cells) + " |" for cells in (first, rule, *others)]


def escaped(text: str) -> str:
    """Text that Markdown, and the HTML it may hold, shows as it is, on one line."""
    return _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def write_pictures(chapters: Sequence[Chapter], out: Path) -> dict[str, str]:
    """Write every figure to ``out/figures`` and return its path relative to ``out`` by ``<chapter>-<part>``.

    kaleido draws them in a headless Chrome or Chromium.

    Raises:
        UserError: kaleido or a browser is missing, or drawing failed.
    """
    instead = "leave out --png: report.html has the figures and needs neither"
    try:
        import kaleido
    except ImportError:
        raise UserError(f"PNG figures need kaleido; `pip install 'megatron-flux[report]'`, or {instead}") from None
    import plotly.graph_objects as go
    from choreographer.errors import ChromeNotFoundError

    folder = out / "figures"
    paths = {name: folder / f"{name}.png" for name in figures_of(chapters)}
    jobs = [
        {
            "fig": go.Figure(painted(figure, LIGHT)),
            "path": paths[name],
            "opts": {**PNG, "height": figure["layout"]["height"]},
        }
        for name, figure in figures_of(chapters).items()
    ]
    logging.getLogger("kaleido").setLevel(logging.WARNING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # mathjax off: it would be asked for over the network.
        kaleido.write_fig_from_object_sync(jobs, kopts={"mathjax": False, "timeout": PNG_TIMEOUT_S, "n": 1})
    except ChromeNotFoundError:
        raise UserError(
            f"PNG figures need Chrome or Chromium, and none was found; install one (Debian: apt-get install chromium) "
            f"or name it in BROWSER_PATH, or {instead}"
        ) from None
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"PNG figures could not be drawn ({cause}); {instead}") from error
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise UserError(f"PNG figures could not be drawn (no {missing[0]}); {instead}")
    return {name: path.relative_to(out).as_posix() for name, path in paths.items()}


def painted(figure: Mapping[str, Any], palette: Mapping[str, str]) -> Figure:
    """A figure with its colours filled in; the page's script does the same when the reader's scheme changes."""
    painted = copy.deepcopy(dict(figure))
    for trace in painted["data"]:
        own = palette[trace["meta"]["colour"]]
        trace["marker"] = {**trace.get("marker", {}), "color": own}
        if trace["type"] != "bar":
            trace["line"] = {**trace.get("line", {}), "color": own}
    layout = painted["layout"]
    for shape in layout.get("shapes", []):
        if shape["type"] == "line":
            shape["line"] = {**shape.get("line", {}), "color": palette[shape["name"]]}
        else:
            shape["fillcolor"] = palette[shape["name"]]
    layout["font"] = {"color": palette["text"], "size": 13}
    layout["paper_bgcolor"] = layout["plot_bgcolor"] = palette["page"]
    for axis in ("xaxis", "yaxis"):
        layout[axis] = {**layout.get(axis, {}), "gridcolor": palette["line"], "linecolor": palette["line"]}
    return painted
