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
MAX_POINTS = 2000
"""Points of a trace beyond which a page gets slow."""

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


def thinned(points: Sequence[tuple[Any, ...]], at: int = 1) -> tuple[list[tuple[Any, ...]], str]:
    """At most :data:`MAX_POINTS` of the points, and the sentence that says what was left out, if anything.

    Of each group of neighbours the ones with the least and the largest value (``point[at]``) stay, so that no peak
    vanishes; a group without any finite value stays as a gap.
    """
    if len(points) <= MAX_POINTS:
        return list(points), ""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        known = [point for point in points[start : start + size] if finite(point[at]) is not None]
        ends = {min(known, key=lambda p: p[at]), max(known, key=lambda p: p[at])} if known else {points[start]}
        kept += sorted(ends, key=lambda point: point[0])
    return kept, f"Of every {size} steps the least and the largest value are drawn."


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
