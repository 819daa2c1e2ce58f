"""The figures as plain plotly JSON: what all share, curves and step times of training, bars and efficiencies of all.

Colours are those of the page, ``var(--flux)``: its script takes them from the style sheet, so that one file serves
light, dark and print. Numbers are finite or None (a gap); what a gap hides is in the caption. A figure function returns
``(figure or None, caption)``: without data the caption says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from megatron_flux.metrics.report.render import Figure
from megatron_flux.metrics.summary import Record, counts, relative_differences, sampled
from megatron_flux.metrics.table import MINUS, counted, finite

Arms = Mapping[str, Sequence[Record]]
Drawn = tuple[Figure | None, str]

MAX_POINTS = 2000
"""Points of a trace beyond which a page gets slow."""
LOW, HIGH = -1.0, 1.5
"""Overlap efficiencies beyond these are drawn at the edge: one far away would leave no room for the others."""

SYMBOLS = {"baseline": "circle", "flux": "diamond"}
# Curves of the two arms usually lie on each other: a wide pale band with a thin line on it shows both.
_STYLES: dict[str, Any] = {"baseline": {"width": 7, "opacity": 0.45}, "flux": {"width": 2, "opacity": 1}}


def figure_of(traces: list[Figure], x: str, y: str, **layout: Any) -> Figure:
    """Traces with axes titled ``x`` and ``y``; ``layout`` holds what else differs from the report's usual."""
    usual = {"automargin": True, "zeroline": False, "gridcolor": "var(--line)", "linecolor": "var(--line)"}
    for name, title in (("xaxis", x), ("yaxis", y)):
        layout[name] = {"title": {"text": title, "font": {"size": 13}}, **usual, **layout.get(name, {})}
    colours = {"paper_bgcolor": "var(--page)", "plot_bgcolor": "var(--page)"}
    font = {"color": "var(--text)", "size": 13}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    margin = {"l": 8, "r": 12, "t": 36 if any(trace.get("showlegend", True) for trace in traces) else 12, "b": 8}
    shared = {"font": font, "legend": legend, "margin": margin, "height": 360, "hovermode": "closest", **colours}
    return {"data": traces, "layout": shared | layout}


def trace_of(
    name: str, colour: str, points: Iterable[tuple[Any, ...]], hover: str, symbol: str = "", size: int = 9, **more: Any
) -> Figure:
    """Points ``(x, y, ...)``, with gaps for what cannot be drawn; what else they hold is shown where ``hover`` says so.

    ``more`` holds further fields of the trace, and ``width`` of its line.
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
    """A name that comes from a run, as plotly has to be given it: plotly takes some tags in text for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _thinned(points: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], str]:
    """At most :data:`MAX_POINTS` of the points ``(x, y, ...)``, and the sentence that names what was left out, if any.

    Of each group of neighbours the ones with the least and the largest y stay, so that no peak vanishes; a group
    without any finite y stays as a gap.
    """
    if len(points) <= MAX_POINTS:
        return list(points), ""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        known = [point for point in points[start : start + size] if finite(point[1])]
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else {points[start]}
        kept += sorted(ends, key=lambda point: point[0])
    return kept, f"Of every {size} steps the least and the largest value are drawn."


def _in_order(arms: Arms) -> list[tuple[str, Record]]:
    """``(arm, record)`` in order of execution."""
    steps = [(arm, record) for arm, records in arms.items() for record in records]
    return sorted(steps, key=lambda step: (step[1]["block"], step[1]["iteration"], step[0]))


def _sentences(*parts: str) -> str:
    return " ".join(dict.fromkeys(filter(None, parts)))


def curves(arms: Arms, name: str, unit: str, points_of: str = "") -> Drawn:
    """A field of both arms over the iterations, and as points another of the same unit, where it is known."""
    traces, said = [], []
    for arm, records in arms.items():
        points, left_out = _thinned([(record["iteration"], record[name]) for record in records])
        lost = sum(not math.isfinite(record[name]) for record in records)
        if lost < len(records):
            style: Figure = {"mode": "lines" if len(records) > 1 else "markers", **_STYLES[arm]}
            traces.append(trace_of(arm, arm, points, f"{arm} %{{y:.7g}}<br>iteration %{{x}}", **style))
        if points := [(r["iteration"], r[points_of]) for r in records if r.get(points_of) is not None]:
            shown = f"{arm}, {points_of}"
            traces.append(trace_of(shown, arm, points, f"{shown} %{{y:.7g}}<br>iteration %{{x}}", SYMBOLS[arm]))
        said.append(f"The {arm} {name} is not finite in {counted(lost)}." if lost else "")
        said.append(left_out if records else f"The {arm} arm has no records.")
    title = f"{name} ({unit})" if unit else name
    return figure_of(traces, "iteration", title) if traces else None, _sentences(*said)


def difference(arms: Arms, name: str) -> Drawn:
    """|flux - baseline| / |baseline| of a field over the iterations both arms have."""
    differences = relative_differences(arms["baseline"], arms["flux"], name)
    if not differences:
        return None, "The arms have no iteration in common, so there is no difference to show."
    known = [value for _, value in differences if math.isfinite(value)]
    lost = len(differences) - len(known)
    caption = f"No finite difference in {counted(lost)}." if lost else ""
    if not any(known):
        same = f"The {name} is identical in {counted(len(known))} of {len(differences)}."
        return None, _sentences(same if known else "", caption)
    points, left_out = _thinned(differences)
    style: Figure = {"mode": "lines+markers" if len(known) < 100 else "lines", "showlegend": False}
    drawn = trace_of("relative difference", "text", points, "%{y:.2e}<br>iteration %{x}", SYMBOLS["flux"], 5, **style)
    axis = {"tickformat": ".1e", "rangemode": "tozero"}
    made = figure_of([drawn], "iteration", "relative difference (1)", yaxis=axis, height=280)
    return made, _sentences(caption, left_out)


def step_times(arms: Arms) -> Drawn:
    """Step time (ms) over the order of execution, warm-up as open markers."""
    steps = [(arm, record, 1000 * record["iteration-time"]) for arm, record in _in_order(arms)]
    times = [time for _, record, time in steps if counts(record) and math.isfinite(time)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    uncounted = "warm-up or profiled" if any(record.get("profiled") for _, record, _ in steps) else "warm-up"
    traces, remarks = [], []
    for arm, counting in product(arms, (True, False)):
        every = [
            (x, time, record["iteration"], record["block"])
            for x, (of, record, time) in enumerate(steps, 1)
            if of == arm and counts(record) is counting
        ]
        points, left_out = _thinned(every)
        remarks.append(left_out)
        if points:
            name, symbol = (arm, SYMBOLS[arm]) if counting else (f"{arm}, {uncounted}", f"{SYMBOLS[arm]}-open")
            hover = f"{arm} %{{y:.4g}} ms<br>iteration %{{customdata[0]}}, block %{{customdata[1]}}"
            traces.append(trace_of(name, arm, points, hover, symbol, size=7))
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    low, high = min(times), max(time for *_, time in steps if time <= 1.25 * max(times))
    pad = 0.08 * (high - low) or 0.05 * high
    above = sum(time > high for *_, time in steps)
    caption = _sentences(
        f"Open markers are {uncounted} steps, left out of all statistics"
        + (f"; above the axis: {above}." if above else "."),
        *remarks,
    )
    axis = {"range": [low - pad, high + pad]}
    return figure_of(traces, "step in order of execution", "step time (ms)", yaxis=axis), caption


def samples(arms: Arms, title: str, pick: Callable[[Record], Any]) -> Drawn:
    """What ``pick`` takes of each timed sample over the order of execution; caption: how many samples there are."""
    usable = {id(record) for records in arms.values() for record in sampled(records)}
    order = [(arm, pick(record) if id(record) in usable else None) for arm, record in _in_order(arms)]
    traces, count = [], 0
    for arm in arms:
        if points := [(x, y) for x, (of, y) in enumerate(order, 1) if of == arm and finite(y)]:
            count += len(points)
            traces.append(trace_of(arm, arm, points, f"{arm} %{{y:.4g}}<br>step %{{x}}", SYMBOLS[arm], size=8))
    if not traces:
        return None, ""
    caption = f"{counted(count, 'timed sampled step')}."
    return figure_of(traces, "step in order of execution", title, height=280), caption


TIME_PARTS = {
    "gemm": "GEMM",
    "fused": "fused operators",
    "attention": "attention",
    "norm": "norm",
    "optimizer": "optimizer",
    "other": "other kernels",
    "communication_exposed": "exposed communication ¹",
    "idle": "idle",
}
"""The names of a breakdown's disjoint parts in the order of the stack; the colour of each is ``part-<key>``.

Hidden communication is not among them: it takes no time of its own."""


def time_parts(
    breakdowns: Mapping[str, Mapping[str, float]], unit: str, names: Mapping[str, str] = TIME_PARTS
) -> Figure | None:
    """Stacked bars of the parts in ``names`` (ms per ``unit``), one bar for each named breakdown."""
    known = {name: parts for name, parts in breakdowns.items() if any(parts.get(key) for key in names)}
    if not known:
        return None
    bars = list(reversed(known.items()))  # plotly stacks upwards: the first goes on top
    traces = []
    for key, name in names.items():
        lengths = [(parts.get(key) or 0.0, bar) for bar, parts in bars]
        if any(length for length, _ in lengths):
            hover = f"%{{y}}: {name} %{{x:.4g}} ms"
            traces.append(trace_of(name, f"part-{key}", lengths, hover, type="bar", orientation="h"))
    # Below the axis: above, a legend of eight entries would cover the bars on a phone.
    legend = {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}
    legend["maxheight"] = 1  # by default a legend that fills half of a figure gets a scroll bar
    margin = {"l": 8, "r": 12, "t": 12, "b": 95}
    height = 44 * len(known)
    layout = {"barmode": "stack", "bargap": 0.35, "legend": legend, "margin": margin, "height": height + 110}
    # Room for a legend of three lines, which a PNG has; a page measures its own and makes it fit.
    layout["meta"] = {"above_legend": height + 12, "axis": 50}
    return figure_of(traces, f"ms per {unit}", "", **layout)


def efficiencies(rows: Sequence[str], methods: Mapping[str, tuple[str, str, Sequence[float | None]]]) -> Drawn:
    """Overlap efficiency (%) of several methods, one row of points for each of ``rows`` (``<br>`` breaks a line).

    ``methods``: colour, marker and the value of each row (a fraction, or None) by the method's name.
    """
    every = [value for *_, values in methods.values() for value in values if finite(value)]
    if not every:
        return None, "No overlap efficiency is known: there is nothing to hide, or it was not measured."
    names = list(reversed(rows))  # plotly counts upwards: the first goes on top
    traces = []
    for name, (colour, symbol, values) in methods.items():
        exact = [100 * value if finite(value) else None for value in reversed(values)]
        if any(value is not None for value in exact):
            x = [None if value is None else min(max(value, 100 * LOW), 100 * HIGH) for value in exact]
            points = zip(x, names, exact, strict=True)
            traces.append(trace_of(name, colour, points, f"{name} %{{customdata[0]:.0f}} %", symbol))
    below, above = sum(value < LOW for value in every), sum(value > HIGH for value in every)
    caption = _sentences(
        "100 %: as fast as the GEMM alone; 0 %: as slow as GEMM and communication in turn.",
        f"{counted(below, 'point')} below {MINUS}{-100 * LOW:.0f} % at the edge." if below else "",
        f"{counted(above, 'point')} above {100 * HIGH:.0f} % at the edge." if above else "",
    )
    least, most = max(min(every), LOW), min(max(every), HIGH)
    axis = {"range": [100 * min(least, 0) - 8, 100 * max(most, 1) + 8], "nticks": 5, "tickfont": {"size": 11}}
    dashed: Figure = {"type": "line", "y0": 0, "y1": 1, "yref": "paper"}
    dashed["line"] = {"width": 1, "dash": "dash", "color": "var(--quiet)"}
    height = 130 + (10 + 15 * max(row.count("<br>") + 1 for row in rows)) * len(rows)
    row_axis = {"tickfont": {"size": 11}, "range": [-0.6, len(rows) - 0.4]}
    layout: Figure = {"xaxis": axis, "yaxis": row_axis, "height": height}
    layout["shapes"] = [dashed | {"x0": x, "x1": x} for x in (0, 100)]
    return figure_of(traces, "overlap efficiency (%)", "", **layout), caption
