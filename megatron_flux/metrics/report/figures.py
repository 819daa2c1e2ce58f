"""Draw the figures with plotly.

A function returns ``(figure or None, caption)``: without data the caption says why. What is not finite is a gap. Blue
and vermilion of Okabe and Ito are told apart with every common colour vision, on light and dark pages. Nothing is shown
by colour alone: lines differ in width, points in shape, bars have a legend. The page chooses the colours around them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_flux.metrics.summary import Record, counts, relative_differences
from megatron_flux.metrics.table import counted

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Variants = Mapping[str, Sequence[Record]]
Drawn = tuple["Figure | None", str]
Point = tuple[Any, ...]  # x, y and, where the reader may ask for it, a text

MAX_POINTS = 2000  # points of a trace beyond which a page gets slow

COLOURS = {"baseline": "#0072b2", "flux": "#d55e00"}
SYMBOLS = {"baseline": "circle", "flux": "diamond"}
# Curves of baseline and flux usually lie on each other: a wide pale band with a thin line on it shows both.
_WIDTHS = {"baseline": 7, "flux": 2}
_OPACITIES = {"baseline": 0.45, "flux": 1.0}


def figure_of(x: str, y: str, **layout: Any) -> Figure:
    """Return an empty figure with axes titled ``x`` and ``y``; ``layout`` overrides the report's defaults."""
    import plotly.graph_objects as go

    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    figure = go.Figure(layout={"template": "none", "height": 360, "legend": legend, "hovermode": "closest"})
    figure.update_xaxes(title_text=x, automargin=True, zeroline=False)
    figure.update_yaxes(title_text=y, automargin=True, zeroline=False)
    return figure.update_layout(margin={"l": 8, "r": 12, "t": 36, "b": 8}, **layout)


def _scatter(
    figure: Figure, name: str, variant: str, points: Sequence[Point], *, symbol: str = "", **more: Any
) -> None:
    """Add points of a variant to ``figure``; ``more`` are fields of the trace, ``mode`` among them."""
    x, y, *text = zip(*_thinned(points), strict=True)
    figure.add_scatter(
        **{"x": x, "y": y, "name": name, "mode": "markers", "opacity": 1.0, "text": text[0] if text else None} | more,
        line={"color": COLOURS[variant], "width": _WIDTHS[variant]},
        marker={"symbol": symbol or SYMBOLS[variant], "size": 8, "color": COLOURS[variant]},
    )


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most :data:`MAX_POINTS`: the least and the largest y of each group of neighbours."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        known = [point for point in group if math.isfinite(point[1])] or group[:1]
        kept += sorted({min(known, key=lambda point: point[1]), max(known, key=lambda point: point[1])})
    return kept


def curves(variants: Variants, name: str, unit: str) -> Drawn:
    """Draw a field of both variants over the iterations."""
    figure, notes = figure_of("iteration", f"{name} ({unit})" if unit else name, yaxis_hoverformat=".7g"), []
    for variant, records in variants.items():
        lost = sum(not math.isfinite(record[name]) for record in records)
        if lost < len(records):
            mode = "lines" if len(records) > 1 else "markers"
            points = [(record["iteration"], record[name]) for record in records]
            _scatter(figure, variant, variant, points, mode=mode, opacity=_OPACITIES[variant])
        if lost:
            notes.append(f"The {variant} {name} is not finite in {counted(lost)}.")
        if not records:
            notes.append(f"There are no records of {variant}.")
    return figure if figure.data else None, " ".join(notes)


def difference(variants: Variants, name: str) -> Drawn:
    """Draw |flux - baseline| / |baseline| of a field over the iterations that both variants have."""
    differences = relative_differences(variants["baseline"], variants["flux"], name)
    if not differences:
        return None, "Baseline and flux have no iteration in common, so there is no difference to show."
    known = [value for _, value in differences if math.isfinite(value)]
    lost = len(differences) - len(known)
    caption = f"No finite difference in {counted(lost)}." if lost else ""
    if not any(known):
        same = f"The {name} is identical in {counted(len(known))} of {len(differences)}. " if known else ""
        return None, (same + caption).strip()
    axis = {"tickformat": ".1e", "hoverformat": ".2e", "rangemode": "tozero"}
    figure = figure_of("iteration", "relative difference", yaxis=axis, height=280)
    _scatter(figure, "relative difference", "flux", differences, mode="lines+markers")
    return figure, caption


def step_times(variants: Variants) -> Drawn:
    """Draw the step time (ms) over the order of execution; steps that do not count as open markers."""
    steps = [
        (record["block"], record["iteration"], of, record) for of, records in variants.items() for record in records
    ]
    drawn: dict[tuple[str, bool], list[Point]] = {(of, counting): [] for of in variants for counting in (True, False)}
    for place, (block, iteration, of, record) in enumerate(sorted(steps, key=lambda step: step[:3]), 1):
        about = f"iteration {iteration}, block {block}"
        drawn[of, counts(record)].append((place, 1000 * record["iteration-time"], about))
    times = [time for of in variants for _, time, _ in drawn[of, True] if math.isfinite(time)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    every = [time for points in drawn.values() for _, time, _ in points]
    low, high = min(times), max(time for time in every if time <= 1.25 * max(times))
    pad = 0.08 * (high - low) or 0.05 * high
    figure = figure_of(
        "step in order of execution", "step time (ms)", yaxis_range=[low - pad, high + pad], yaxis_hoverformat=".4g"
    )
    for (of, counting), points in drawn.items():
        if points:
            name, symbol = (of, SYMBOLS[of]) if counting else (f"{of}, not timed", f"{SYMBOLS[of]}-open")
            _scatter(figure, name, of, points, symbol=symbol)
    above = sum(time > high for time in every)
    caption = "Open markers are warm-up or profiled steps, excluded from all statistics"
    return figure, caption + (f"; above the axis: {above}." if above else ".")
