"""What all figures share: plain plotly JSON, validated against plotly's schema by the tests.

Colours are not in here. A trace names one of the palette (``meta.colour``) and the page's script paints it from the
page's CSS variables, so that one file serves light, dark and print. Numbers are finite or None (a gap); what a gap
hides is said in the caption.

A figure function returns ``(figure or None, caption)``: without data there is no figure, and the caption says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_flux.metrics.report.parts import Figure
from megatron_flux.metrics.statistics import Record

Arms = Mapping[str, Sequence[Record]]
Drawn = tuple[Figure | None, str]

# Curves of the two arms usually lie on each other: a wide pale band with a thin line on it shows both.
STYLE = {
    "baseline": {"width": 7, "opacity": 0.45, "symbol": "circle"},
    "flux": {"width": 2, "opacity": 1, "symbol": "diamond"},
}


def figure(traces: list[Figure], x: str, y: str, **layout: Any) -> Figure:
    """Traces with axes titled ``x`` and ``y``; ``layout`` holds what else differs from the report's usual."""
    axes = {
        name: {
            "title": {"text": title, "font": {"size": 13}},
            "automargin": True,
            "zeroline": False,
            **layout.pop(name, {}),
        }
        for name, title in (("xaxis", x), ("yaxis", y))
    }
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    margin = {"l": 8, "r": 12, "t": 36 if any(trace.get("showlegend", True) for trace in traces) else 12, "b": 8}
    return {"data": traces, "layout": {"legend": legend, "margin": margin, "height": 360, **axes, **layout}}


def line(colour: str, *, x: float | None = None, y: float | None = None, dash: str = "solid") -> Figure:
    """A line across the whole plot at one ``x`` or one ``y``."""
    at = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1} if y is None else {"y0": y, "y1": y}
    if y is not None:
        at |= {"xref": "paper", "x0": 0, "x1": 1}
    return {"type": "line", "layer": "above", "name": colour, "line": {"width": 1, "dash": dash}, **at}


def counted(count: int, noun: str = "iteration") -> str:
    """``3 iterations``, ``1 iteration``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def finite(value: float | None) -> float | None:
    """A gap for what cannot be drawn."""
    return value if value is not None and math.isfinite(value) else None


def label(text: str) -> str:
    """A name that comes from a run, as plotly has to be given it: plotly takes some tags in text for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
