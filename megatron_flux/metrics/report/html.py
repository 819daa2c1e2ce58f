"""Chapters as one HTML page that needs nothing but itself.

plotly.js is inside it once, and a content security policy forbids every request, so a page that needs the network would
be broken for everybody, not only for those without one. Whatever a run holds is text: autoescaped in HTML; the figures'
JSON lies in a data block in which ``<``, ``>`` and ``&`` are escaped and is parsed, never run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_flux.metrics.report.palette import DARK, LIGHT, PRINT, css
from megatron_flux.metrics.report.parts import Chapter


def text(chapters: Sequence[Chapter], title: str) -> str:
    """The page. ``title`` is shown by the browser."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("megatron_flux.metrics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {
        f"{chapter.id}-{part.id}": part.figure
        for chapter in chapters
        for part in chapter.parts
        if part.figure is not None
    }
    return environment.get_template("report.html.j2").render(
        title=title,
        chapters=chapters,
        palettes={"light": css(LIGHT), "dark": css(DARK), "print": css(PRINT)},
        figures_json=script_json(figures),
        plotlyjs=get_plotlyjs() if figures else "",
    )


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
