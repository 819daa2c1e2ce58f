"""Make the figures as plain plotly JSON.

Colours are CSS variables of the page, ``var(--flux)``, so that one file serves light, dark and print. Numbers are
finite or None (a gap). A figure function returns ``(figure or None, caption)``: without data the caption says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_flux.metrics.report.page import Figure
from megatron_flux.metrics.summary import Record, counts, relative_differences, sampled
from megatron_flux.metrics.table import counted, finite

Variants = Mapping[str, Sequence[Record]]
Drawn = tuple[Figure | None, str]

MAX_POINTS = 2000
"""Points of a trace beyond which a page gets slow."""

SYMBOLS = {"baseline": "circle", "flux": "diamond"}
# Curves of baseline and flux usually lie on each other: a wide pale band with a thin line on it shows both.
_STYLES: dict[str, Any] = {"baseline": {"width": 7, "opacity": 0.45}, "flux": {"width": 2, "opacity": 1}}

TIME_PARTS = {
    "gemm": "GEMM",
    "fused": "fused operators",
    "attention": "attention",
    "norm": "norm",
    "optimizer": "optimizer",
    "other": "other kernels",
    "communication_exposed": "exposed communication",
    "idle": "idle",
}
"""Names of a breakdown's disjoint parts in the order of the stack; the colour of each is ``part-<key>``."""


def figure_of(traces: list[Figure], x: str, y: str, **layout: Any) -> Figure:
    """Return traces with axes titled ``x`` and ``y``; ``layout`` overrides the report's defaults."""
    usual = {"automargin": True, "zeroline": False, "gridcolor": "var(--line)", "linecolor": "var(--line)"}
    for name, title in (("xaxis", x), ("yaxis", y)):
        layout[name] = {"title": {"text": title, "font": {"size": 13}}, **usual, **layout.get(name, {})}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    top = 36 if any(trace.get("showlegend", True) for trace in traces) else 12
    shared: Figure = {"font": {"color": "var(--text)", "size": 13}, "legend": legend, "height": 360}
    shared |= {"margin": {"l": 8, "r": 12, "t": top, "b": 8}, "hovermode": "closest"}
    shared |= {"paper_bgcolor": "var(--page)", "plot_bgcolor": "var(--page)"}
    return {"data": traces, "layout": shared | layout}


def trace_of(
    name: str, colour: str, points: Iterable[tuple[Any, ...]], hover: str, symbol: str = "", size: int = 9, **more: Any
) -> Figure:
    """Return a trace of points ``(x, y, ...)``; further values are for ``hover``, ``more`` are fields of the trace.

    ``width`` among them is that of its line. What is not finite becomes a gap.
    """
    x, y, *others = (
        [None if isinstance(value, float) and not finite(value) else value for value in values]
        for values in zip(*points, strict=True)
    )
    drawn: Figure = {"type": "scatter", "name": name, "x": x, "y": y, "hovertemplate": f"{hover}<extra></extra>"}
    drawn["marker"] = {"color": f"var(--{colour})"} | ({"symbol": symbol, "size": size} if symbol else {})
    if "type" not in more:
        drawn |= {"mode": "markers", "line": {"color": f"var(--{colour})", "width": more.pop("width", 2)}}
    if others:
        drawn["customdata"] = list(map(list, zip(*others, strict=True)))
    return drawn | more


def label(text: str) -> str:
    """Escape a name that comes from a run: plotly takes some tags in text for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _thinned(points: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return at most :data:`MAX_POINTS`: the least and the largest y of each group of neighbours."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        known = [point for point in points[start : start + size] if finite(point[1])]
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else {points[start]}
        kept += sorted(ends, key=lambda point: point[0])
    return kept


def _in_order(variants: Variants) -> list[tuple[str, Record]]:
    """Return ``(variant, record)`` in order of execution."""
    steps = [(variant, record) for variant, records in variants.items() for record in records]
    return sorted(steps, key=lambda step: (step[1]["block"], step[1]["iteration"], step[0]))


def curves(variants: Variants, name: str, unit: str, points_of: str = "") -> Drawn:
    """Draw a field of both variants over the iterations; as points the field ``points_of`` where it is known."""
    traces, notes = [], []
    for variant, records in variants.items():
        lost = sum(not math.isfinite(record[name]) for record in records)
        if lost < len(records):
            style: Figure = {"mode": "lines" if len(records) > 1 else "markers", **_STYLES[variant]}
            points = _thinned([(record["iteration"], record[name]) for record in records])
            traces.append(trace_of(variant, variant, points, f"{variant} %{{y:.7g}}<br>iteration %{{x}}", **style))
        if points := [(r["iteration"], r[points_of]) for r in records if r.get(points_of) is not None]:
            shown = f"{variant}, {points_of}"
            traces.append(trace_of(shown, variant, points, f"{shown} %{{y:.7g}}<br>iteration %{{x}}", SYMBOLS[variant]))
        if lost:
            notes.append(f"The {variant} {name} is not finite in {counted(lost)}.")
        if not records:
            notes.append(f"There are no records of {variant}.")
    title = f"{name} ({unit})" if unit else name
    return figure_of(traces, "iteration", title) if traces else None, " ".join(notes)


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
    style: Figure = {"mode": "lines+markers" if len(known) < 100 else "lines", "showlegend": False}
    points, hover = _thinned(differences), "%{y:.2e}<br>iteration %{x}"
    drawn = trace_of("relative difference", "text", points, hover, SYMBOLS["flux"], 5, **style)
    axis = {"tickformat": ".1e", "rangemode": "tozero"}
    return figure_of([drawn], "iteration", "relative difference", yaxis=axis, height=280), caption


def step_times(variants: Variants) -> Drawn:
    """Draw the step time (ms) over the order of execution; steps that do not count as open markers."""
    steps = [(variant, record, 1000 * record["iteration-time"]) for variant, record in _in_order(variants)]
    times = [time for _, record, time in steps if counts(record) and math.isfinite(time)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    traces = []
    for variant in variants:
        for counting in (True, False):
            points = [
                (x, time, record["iteration"], record["block"])
                for x, (of, record, time) in enumerate(steps, 1)
                if of == variant and counts(record) is counting
            ]
            if points:
                name, symbol = (
                    (variant, SYMBOLS[variant]) if counting else (f"{variant}, not timed", f"{SYMBOLS[variant]}-open")
                )
                hover = f"{variant} %{{y:.4g}} ms<br>iteration %{{customdata[0]}}, block %{{customdata[1]}}"
                traces.append(trace_of(name, variant, _thinned(points), hover, symbol, size=7))
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    low, high = min(times), max(time for *_, time in steps if time <= 1.25 * max(times))
    pad = 0.08 * (high - low) or 0.05 * high
    above = sum(time > high for *_, time in steps)
    caption = "Open markers are warm-up or profiled steps, excluded from all statistics"
    axis = {"range": [low - pad, high + pad]}
    figure = figure_of(traces, "step in order of execution", "step time (ms)", yaxis=axis)
    return figure, caption + (f"; above the axis: {above}." if above else ".")


def samples(variants: Variants, title: str, pick: Callable[[Record], Any]) -> Drawn:
    """Draw what ``pick`` returns for each timed sample over the order of execution."""
    usable = {id(record) for records in variants.values() for record in sampled(records)}
    order = [(variant, pick(record) if id(record) in usable else None) for variant, record in _in_order(variants)]
    traces, count = [], 0
    for variant in variants:
        if points := [(x, y) for x, (of, y) in enumerate(order, 1) if of == variant and finite(y)]:
            count += len(points)
            traces.append(
                trace_of(variant, variant, points, f"{variant} %{{y:.4g}}<br>step %{{x}}", SYMBOLS[variant], size=8)
            )
    if not traces:
        return None, ""
    caption = f"{counted(count, 'timed sampled step')}."
    return figure_of(traces, "step in order of execution", title, height=280), caption


def time_parts(breakdowns: Mapping[str, Mapping[str, float]]) -> Figure | None:
    """Draw the parts of each named breakdown (ms per step) as a stacked bar."""
    known = {name: parts for name, parts in breakdowns.items() if any(parts.get(key) for key in TIME_PARTS)}
    if not known:
        return None
    bars = list(reversed(known.items()))  # plotly stacks upwards: the first goes on top
    traces = []
    for key, name in TIME_PARTS.items():
        lengths = [(parts.get(key) or 0.0, bar) for bar, parts in bars]
        if any(length for length, _ in lengths):
            hover = f"%{{y}}: {name} %{{x:.4g}} ms"
            traces.append(trace_of(name, f"part-{key}", lengths, hover, type="bar", orientation="h"))
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}
    # Room for the lines of the legend on a phone.
    layout = {"barmode": "stack", "bargap": 0.35, "legend": legend, "height": 44 * len(known) + 250}
    return figure_of(traces, "ms per step", "", **layout)


EFFICIENCY = "100 %: as fast as the GEMM alone; 0 %: as slow as the collective, then the GEMM."


def efficiencies(values: Mapping[str, float]) -> Figure | None:
    """Draw the overlap efficiency, a fraction, of each named call (``<br>`` breaks a line), lines at 0 and 100 %."""
    if not values:
        return None
    points = [(100 * value, call) for call, value in reversed(list(values.items()))]  # plotly counts upwards
    drawn = trace_of("flux", "flux", points, "%{y}: %{x:.4g} %", SYMBOLS["flux"])
    line = {"width": 1, "dash": "dash", "color": "var(--quiet)"}
    shapes = [{"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line} for at in (0, 100)]
    height = 130 + (10 + 15 * max(call.count("<br>") + 1 for call in values)) * len(values)
    axis = {"tickfont": {"size": 11}, "range": [-0.6, len(values) - 0.4]}
    return figure_of(
        [drawn], "overlap efficiency (%)", "", xaxis={"nticks": 5}, yaxis=axis, height=height, shapes=shapes
    )
