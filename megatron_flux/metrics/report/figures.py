"""The figures as plain plotly JSON: what all share, curves and step times of training, bars and efficiencies of all.

Colours are not in here. A trace names one of the palette (``meta.colour``) and the page's script paints it from the
page's CSS variables, so that one file serves light, dark and print. Numbers are finite or None (a gap); what a gap
hides is in the caption. A figure function returns ``(figure or None, caption)``: without data the caption says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np

from megatron_flux.metrics.report.render import Figure
from megatron_flux.metrics.summary import Record, counts, paired_blocks, relative_differences, timed
from megatron_flux.metrics.table import MINUS, counted, finite

Arms = Mapping[str, Sequence[Record]]
Drawn = tuple[Figure | None, str]

MAX_POINTS = 2000
"""Points of a trace beyond which a page gets slow."""
MAX_BANDS = 400
"""More block bands than this are thinner than a pixel, and slow."""
LOW, HIGH = -1.0, 1.5
"""Overlap efficiencies beyond these are drawn at the edge: one far away would leave no room for the others."""

SYMBOLS = {"baseline": "circle", "flux": "diamond"}
# Curves of the two arms usually lie on each other: a wide pale band with a thin line on it shows both.
_STYLES = {"baseline": {"line": {"width": 7}, "opacity": 0.45}, "flux": {"line": {"width": 2}, "opacity": 1}}


def _figure(traces: list[Figure], x: str, y: str, **layout: Any) -> Figure:
    """Traces with axes titled ``x`` and ``y``; ``layout`` holds what else differs from the report's usual."""
    usual = {"automargin": True, "zeroline": False}
    for name, title in (("xaxis", x), ("yaxis", y)):
        layout[name] = {"title": {"text": title, "font": {"size": 13}}, **usual, **layout.get(name, {})}
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    margin = {"l": 8, "r": 12, "t": 36 if any(trace.get("showlegend", True) for trace in traces) else 12, "b": 8}
    return {"data": traces, "layout": {"legend": legend, "margin": margin, "height": 360, **layout}}


def _trace(
    name: str, colour: str, points: Iterable[tuple[Any, ...]], hover: str, symbol: str = "", size: int = 9, **more: Any
) -> Figure:
    """Points ``(x, y, ...)``, with gaps for what cannot be drawn; what else they hold is shown where ``hover`` says so.

    ``more`` holds further fields of the trace.
    """
    x, y, *others = (
        [None if isinstance(value, float) and not finite(value) else value for value in values]
        for values in zip(*points, strict=True)
    )
    drawn = {"name": name, "meta": {"colour": colour}, "x": x, "y": y, "hovertemplate": f"{hover}<extra></extra>"}
    drawn |= {"marker": {"symbol": symbol, "size": size}} if symbol else {}
    drawn |= {"customdata": list(map(list, zip(*others, strict=True)))} if others else {}
    return drawn | ({} if "type" in more else {"type": "scatter", "mode": "markers"}) | more


def _stacked(
    bars: Mapping[str, Mapping[str, float]], parts: Mapping[str, tuple[str, str]], hover: str, text: str = ""
) -> list[Figure]:
    """Horizontal bars by name, stacked of ``parts``: name and colour by the key that their length has in ``bars``."""
    traces = []
    for key, (name, colour) in parts.items():
        # plotly stacks upwards: the first goes on top
        lengths = [(found.get(key) or 0.0, bar) for bar, found in reversed(bars.items())]
        style: dict[str, Any] = {"type": "bar", "orientation": "h"}
        if text:  # inside: beside a bar it would be cut by the edge of a narrow page
            style |= {"text": [text.format(name, x) if x else "" for x, _ in lengths], "textposition": "inside"}
        if any(x for x, _ in lengths):
            traces.append(_trace(name, colour, lengths, f"%{{y}}: {name} {hover}", **style))
    return traces


def _shape(colour: str, ends: Mapping[str, Sequence[float]], **style: Any) -> Figure:
    """From one end to the other along the axis in ``ends``, and over the whole plot along the other."""
    for axis in "xy":
        low, high = ends.get(axis, (0, 1))
        style |= {f"{axis}ref": axis if axis in ends else "paper", f"{axis}0": low, f"{axis}1": high}
    return {"name": colour, **style}


def _line(colour: str, dash: str = "solid", **at: float) -> Figure:
    """A line across the whole plot at one ``x`` or one ``y``."""
    ends = {axis: (value, value) for axis, value in at.items()}
    return _shape(colour, ends, type="line", layer="above", line={"width": 1, "dash": dash})


def _band(colour: str, opacity: float, **ends: Sequence[float]) -> Figure:
    """A rectangle behind the points between two ``x`` or two ``y``."""
    return _shape(colour, ends, type="rect", layer="below", line={"width": 0}, opacity=opacity)


def _padded(values: Sequence[float], least: float) -> list[float]:
    """Ends of an axis that shows all ``values``; ``least``: the space on either side where they are one."""
    pad = 0.08 * (max(values) - min(values)) or least
    return [min(values) - pad, max(values) + pad]


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
    return " ".join(part for part in parts if part)


def curves(arms: Arms, name: str, unit: str) -> Drawn:
    """A field of both arms over the iterations."""
    traces, left_out = [], {}
    for arm, records in arms.items():
        shown, remark = _thinned([(record["iteration"], record[name]) for record in records])
        left_out[remark] = None
        if any(math.isfinite(record[name]) for record in records):
            mode = "lines" if len(records) > 1 else "markers"
            traces.append(_trace(arm, arm, shown, f"{arm} %{{y:.7g}}<br>iteration %{{x}}", mode=mode, **_STYLES[arm]))
    lost = {arm: sum(not math.isfinite(record[name]) for record in records) for arm, records in arms.items()}
    caption = _sentences(
        *(f"The {arm} {name} is not finite in {counted(count)}." for arm, count in lost.items() if count),
        *left_out,
        *(f"The {arm} arm has no records." for arm, records in arms.items() if not records),
    )
    return _figure(traces, "iteration", f"{name} ({unit})" if unit else name) if traces else None, caption


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
    shown, left_out = _thinned(differences)
    style = {"mode": "lines+markers" if len(known) < 100 else "lines", "line": {"width": 2}, "showlegend": False}
    style |= {"symbol": SYMBOLS["flux"], "size": 5}
    drawn = _trace("relative difference", "text", shown, "%{y:.2e}<br>iteration %{x}", **style)
    axis = {"tickformat": ".1e", "rangemode": "tozero"}
    made = _figure([drawn], "iteration", "relative difference (1)", yaxis=axis, height=280)
    return made, _sentences(caption, left_out)


def step_times(arms: Arms) -> Drawn:
    """Step time (ms) over the order of execution, blocks as bands behind the points, warm-up as open markers."""
    steps = _in_order(arms)
    times = [1000 * record["iteration-time"] for records in arms.values() for record in timed(records)]
    times = [time for time in times if math.isfinite(time)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    uncounted = "warm-up or profiled" if any(record.get("profiled") for _, record in steps) else "warm-up"
    traces: list[Figure] = []
    left_out = ""
    for arm, counting in ((arm, counting) for arm in arms for counting in (True, False)):
        points = [
            (x, 1000 * record["iteration-time"], record["iteration"], record["block"])
            for x, (of, record) in enumerate(steps, 1)
            if of == arm and counts(record) is counting
        ]
        shown, remark = _thinned(points)
        left_out = left_out or remark
        if shown:
            name, symbol = (arm, SYMBOLS[arm]) if counting else (f"{arm}, {uncounted}", f"{SYMBOLS[arm]}-open")
            hover = f"{arm} %{{y:.4g}} ms<br>iteration %{{customdata[0]}}, block %{{customdata[1]}}"
            traces.append(_trace(name, arm, shown, hover, symbol, size=7))
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    every = [1000 * record["iteration-time"] for _, record in steps]
    limit = 1.25 * max(times)
    high = max(time for time in every if time <= limit)
    axis = {"range": _padded([min(times), high], 0.05 * high)}
    # Two shades, since A B B A puts blocks of one arm side by side.
    blocks = [(arm, len(list(block))) for (_, arm), block in groupby((record["block"], arm) for arm, record in steps)]
    ends = pairwise(accumulate((0.5, *(length for _, length in blocks))))
    bands = [_band(arm, (0.18, 0.1)[n % 2], x=x) for n, ((arm, _), x) in enumerate(zip(blocks, ends, strict=True))]
    bands = bands if len(bands) <= MAX_BANDS else []
    above = sum(time > high for time in every)
    caption = _sentences(
        "Shaded bands are the interleaved blocks." if bands else "",
        f"Open markers are {uncounted} steps, left out of all statistics"
        + (f"; above the axis: {above}." if above else "."),
        left_out,
    )
    return _figure(traces, "step in order of execution", "step time (ms)", yaxis=axis, shapes=bands), caption


def samples(arms: Arms, title: str, pick: Callable[[Record], Any]) -> Drawn:
    """What ``pick`` takes of each sample over the order of execution; caption: how many samples there are."""
    order = [(arm, pick(record)) for arm, record in _in_order(arms)]
    traces, count = [], 0
    for arm in arms:
        if points := [(x, y) for x, (of, y) in enumerate(order, 1) if of == arm and finite(y)]:
            count += len(points)
            traces.append(_trace(arm, arm, points, f"{arm} %{{y:.4g}}<br>step %{{x}}", SYMBOLS[arm], size=8))
    if not traces:
        return None, ""
    caption = f"{counted(count, 'sampled step')} of {len(order)}."
    return _figure(traces, "step in order of execution", title, height=280), caption


def block_speedups(arms: Arms, interval: Sequence[Any] | None, speedup: Any) -> Drawn:
    """Baseline / flux step time of each pair of neighbouring blocks, with the interval of the whole as a band."""
    if not isinstance(speedup, int | float):
        return None, "Not both arms have been timed, so there is no speed-up."
    pairs = enumerate(paired_blocks(arms["baseline"], arms["flux"]), 1)
    ratios = [(number, float(np.median(baseline) / np.median(flux))) for number, (baseline, flux) in pairs]
    ratios = [(number, ratio) for number, ratio in ratios if math.isfinite(ratio)]
    if len(ratios) < 2:
        return None, "Fewer than two pairs of blocks were timed in both arms, so pairs cannot be compared."
    shapes = [_line("text", y=1.0, dash="dash"), _line("flux", y=speedup)]
    ends = [1.0, speedup, *(ratio for _, ratio in ratios)]
    caption = "Each point: median step time of one baseline block / of its flux neighbour; above 1 flux is faster. "
    caption += "Line: the speed-up over all timed steps."
    if interval is not None and all(map(finite, interval)):  # a step time may not be finite
        shapes.append(_band("flux", 0.2, y=interval))
        ends += interval
        caption += " Band: its 95 % interval, a bootstrap that draws whole pairs of blocks."
    points = _trace("pairs of blocks", "flux", ratios, "pair %{x}: %{y:.4g}", SYMBOLS["flux"], showlegend=False)
    layout = {"yaxis": {"range": _padded(ends, 0.05)}, "shapes": shapes, "height": 300}
    return _figure([points], "pair of blocks", "speed-up (baseline / flux)", **layout), caption


TIME_PARTS: dict[str, tuple[str, str]] = {
    "gemm": ("GEMM", "part-gemm"),
    "fused": ("fused operators", "part-fused"),
    "attention": ("attention", "part-attention"),
    "norm": ("norm", "part-norm"),
    "optimizer": ("optimizer", "part-optimizer"),
    "other": ("other kernels", "part-rest"),
    "communication_exposed": ("exposed communication ¹", "part-exposed"),
    "idle": ("idle", "part-idle"),
}
"""The disjoint parts of a breakdown in the order of the stack: name and colour.

Hidden communication is not among them: it takes no time of its own."""


def time_parts(breakdowns: Mapping[str, Mapping[str, float]], unit: str) -> Figure | None:
    """Stacked bars of :data:`TIME_PARTS` (ms per ``unit``), one bar for each named breakdown."""
    known = {name: parts for name, parts in breakdowns.items() if any(parts.get(key) for key in TIME_PARTS)}
    if not known:
        return None
    traces = _stacked(known, TIME_PARTS, "%{x:.4g} ms")
    # Below the axis: above, a legend of eight entries would cover the bars on a phone.
    legend = {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}
    legend["maxheight"] = 1  # by default a legend that fills half of a figure gets a scroll bar
    margin = {"l": 8, "r": 12, "t": 12, "b": 95}
    height = 44 * len(known)
    narrow = {"height": height + 70 + 20 * len(traces), "margin": {**margin, "b": 55 + 20 * len(traces)}}
    layout = {"barmode": "stack", "bargap": 0.35, "legend": legend, "margin": margin, "height": height + 110}
    layout["meta"] = {"narrow": narrow}  # a phone has one entry of the legend in a line
    return _figure(traces, f"ms per {unit}", "", **layout)


def peak_memory(arms: Mapping[str, Mapping[str, Any]], notes: Sequence[str]) -> Drawn:
    """Most memory (GiB) of each arm, allocated and workspace in one bar; ``arms`` and ``notes`` of the summary."""
    known = {arm: found for arm, found in arms.items() if found.get("peak_memory_bytes") is not None}
    why = [note for note in notes if note.startswith("Peak memory of")]
    if not known:
        return None, " ".join(why) or "Peak memory is not known: arms on CPUs share the memory of their processes."
    parts = {"allocated_peak_bytes": ("allocated", "part-gemm"), "workspace_bytes": ("workspace", "part-fused")}
    gib = {arm: {key: found[key] / 2**30 for key in parts} for arm, found in known.items()}
    traces = _stacked(gib, parts, "%{x:.3f} GiB", text="{} {:.2f} GiB")
    each = [
        f"{arm}: {', '.join(f'{name} {sizes[key]:.2f} GiB' for key, (name, _) in parts.items())}"
        for arm, sizes in gib.items()
    ]
    caption = (
        "Each arm's own on the rank with the most: what torch's allocator held for it, and workspaces in symmetric "
        f"memory. {' '.join(['What NCCL and CUDA themselves take is in neither.', *why])} {'; '.join(each)}."
    )
    axis = {"rangemode": "tozero"}
    text = {"minsize": 9, "mode": "hide"}  # where it does not fit, the caption has it
    return _figure(traces, "peak memory (GiB)", "", xaxis=axis, height=220, barmode="stack", uniformtext=text), caption


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
            traces.append(_trace(name, colour, points, f"{name} %{{customdata[0]:.0f}} %", symbol))
    below, above = sum(value < LOW for value in every), sum(value > HIGH for value in every)
    caption = _sentences(
        "100 %: as fast as the GEMM alone; 0 %: as slow as GEMM and communication in turn.",
        f"{counted(below, 'point')} below {MINUS}{-100 * LOW:.0f} % at the edge." if below else "",
        f"{counted(above, 'point')} above {100 * HIGH:.0f} % at the edge." if above else "",
    )
    least, most = max(min(every), LOW), min(max(every), HIGH)
    axis = {"range": [100 * min(least, 0) - 8, 100 * max(most, 1) + 8], "nticks": 5, "tickfont": {"size": 11}}
    lines = [_line("quiet", x=0, dash="dash"), _line("quiet", x=100, dash="dash")]
    height = 130 + (10 + 15 * max(row.count("<br>") + 1 for row in rows)) * len(rows)
    row_axis = {"tickfont": {"size": 11}, "range": [-0.6, len(rows) - 0.4]}
    layout = {"xaxis": axis, "yaxis": row_axis, "shapes": lines, "height": height}
    return _figure(traces, "overlap efficiency (%)", "", **layout), caption
