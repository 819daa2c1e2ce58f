"""The figures as plain plotly JSON, validated against plotly's schema by the tests.

Colours are not in here. A trace names one of the palette (``meta.colour``) and the page's script paints it from the
page's CSS variables, so that one file serves light, dark and print. Numbers are finite or None (a gap); what a gap
hides is in the caption.

A figure function returns ``(figure or None, caption)``: without data there is no figure, and the caption says why.
In order: what all figures share, curves and step times of training runs, bars and efficiencies of all runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megatron_flux.metrics.report.parts import Figure
from megatron_flux.metrics.summary import Record, counts, paired_blocks, relative_differences, timed
from megatron_flux.metrics.table import MINUS, counted

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
_WIDTHS = {"baseline": 7, "flux": 2}
_OPACITIES = {"baseline": 0.45, "flux": 1}


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


def trace(
    name: str, colour: str, x: Sequence[Any], y: Sequence[Any], hover: str, symbol: str = "", size: int = 9, **more: Any
) -> Figure:
    """Points at ``x`` and ``y``; ``more`` holds further fields of the trace, or others than these."""
    marker = {"marker": {"symbol": symbol, "size": size}} if symbol else {}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "meta": {"colour": colour},
        "x": list(x),
        "y": list(y),
        "hovertemplate": f"{hover}<extra></extra>",
        **marker,
        **more,
    }


def bars(name: str, colour: str, lengths: Sequence[float], y: Sequence[str], hover: str, **more: Any) -> Figure:
    """One segment of every stacked horizontal bar."""
    bar = trace(name, colour, lengths, y, f"%{{y}}: {name} {hover}", type="bar", orientation="h", **more)
    del bar["mode"]
    return bar


def _span(axis: str, ends: Sequence[float] | None) -> Figure:
    """From one end to the other along ``axis``; the whole plot where there are none."""
    low, high = ends or (0, 1)
    return {f"{axis}ref": axis if ends else "paper", f"{axis}0": low, f"{axis}1": high}


def line(colour: str, *, x: float | None = None, y: float | None = None, dash: str = "solid") -> Figure:
    """A line across the whole plot at one ``x`` or one ``y``."""
    place = _span("x", None if x is None else (x, x)) | _span("y", None if y is None else (y, y))
    return {"type": "line", "layer": "above", "name": colour, "line": {"width": 1, "dash": dash}, **place}


def band(colour: str, opacity: float, *, x: Sequence[float] | None = None, y: Sequence[float] | None = None) -> Figure:
    """A rectangle behind the points between two ``x`` or two ``y``."""
    style = {"type": "rect", "layer": "below", "line": {"width": 0}, "opacity": opacity, "name": colour}
    return style | _span("x", x) | _span("y", y)


def _padded(values: Sequence[float], least: float) -> list[float]:
    """Ends of an axis that shows all ``values``; ``least``: the space on either side where they are one."""
    pad = 0.08 * (max(values) - min(values)) or least
    return [min(values) - pad, max(values) + pad]


def finite(value: float | None) -> float | None:
    """A gap for what cannot be drawn."""
    return value if value is not None and math.isfinite(value) else None


def label(text: str) -> str:
    """A name that comes from a run, as plotly has to be given it: plotly takes some tags in text for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def thinned(points: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], str]:
    """At most :data:`MAX_POINTS` of the points ``(x, y, ...)``, and the sentence that names what was left out, if any.

    Of each group of neighbours the ones with the least and the largest y stay, so that no peak vanishes; a group
    without any finite y stays as a gap.
    """
    if len(points) <= MAX_POINTS:
        return list(points), ""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    kept = []
    for start in range(0, len(points), size):
        known = [point for point in points[start : start + size] if finite(point[1]) is not None]
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else {points[start]}
        kept += sorted(ends, key=lambda point: point[0])
    return kept, f"Of every {size} steps the least and the largest value are drawn."


def in_order(arms: Arms) -> list[tuple[str, Record]]:
    """``(arm, record)`` in order of execution."""
    steps = [(arm, record) for arm, records in arms.items() for record in records]
    return sorted(steps, key=lambda step: (step[1]["block"], step[1]["iteration"], step[0]))


def curves(arms: Arms, name: str, unit: str) -> Drawn:
    """A field of both arms over the iterations."""
    traces, remarks = [], []
    for arm, records in arms.items():
        shown, left_out = thinned([(record["iteration"], record[name]) for record in records])
        remarks.append(left_out)
        if any(math.isfinite(record[name]) for record in records):
            x, y = zip(*shown, strict=True)
            hover = f"{arm} %{{y:.7g}}<br>iteration %{{x}}"
            style = {"line": {"width": _WIDTHS[arm]}, "opacity": _OPACITIES[arm]}
            mode = "lines" if len(records) > 1 else "markers"
            traces.append(trace(arm, arm, x, [finite(value) for value in y], hover, mode=mode, **style))
    lost = {arm: sum(not math.isfinite(record[name]) for record in records) for arm, records in arms.items()}
    caption = " ".join(
        [f"The {arm} {name} is not finite in {counted(count)}." for arm, count in lost.items() if count]
        + [remark for remark in dict.fromkeys(remarks) if remark]
        + [f"The {arm} arm has no records." for arm, records in arms.items() if not records]
    )
    return figure(traces, "iteration", f"{name} ({unit})" if unit else name) if traces else None, caption


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
        return None, f"{same} {caption}".strip() if known else caption
    shown, left_out = thinned(differences)
    drawn = trace(
        "relative difference",
        "text",
        [iteration for iteration, _ in shown],
        [finite(value) for _, value in shown],
        "%{y:.2e}<br>iteration %{x}",
        symbol=SYMBOLS["flux"],
        size=5,
        mode="lines+markers" if len(known) < 100 else "lines",
        line={"width": 2},
        showlegend=False,
    )
    axis = {"tickformat": ".1e", "rangemode": "tozero"}
    made = figure([drawn], "iteration", "relative difference (1)", yaxis=axis, height=280)
    return made, f"{caption} {left_out}".strip()


def step_times(arms: Arms) -> Drawn:
    """Step time (ms) over the order of execution, blocks as bands behind the points, warm-up as open markers."""
    steps = in_order(arms)
    times = [1000 * record["iteration-time"] for records in arms.values() for record in timed(records)]
    times = [time for time in times if math.isfinite(time)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    uncounted = "warm-up or profiled" if any(record.get("profiled") for _, record in steps) else "warm-up"
    traces: list[Figure] = []
    left_out = ""
    for arm in arms:
        for counting in (True, False):
            points = [
                (x, 1000 * record["iteration-time"], record["iteration"], record["block"])
                for x, (of, record) in enumerate(steps, 1)
                if of == arm and counts(record) is counting
            ]
            shown, remark = thinned(points)
            left_out = left_out or remark
            if not shown:
                continue
            drawn = trace(
                arm if counting else f"{arm}, {uncounted}",
                arm,
                [x for x, *_ in shown],
                [finite(time) for _, time, *_ in shown],
                f"{arm} %{{y:.4g}} ms<br>iteration %{{customdata[0]}}, block %{{customdata[1]}}",
                symbol=SYMBOLS[arm] + ("" if counting else "-open"),
                size=7,
                customdata=[[iteration, block] for *_, iteration, block in shown],
            )
            traces.append(drawn)
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    every = [1000 * record["iteration-time"] for _, record in steps]
    limit = 1.25 * max(times)
    high = max(time for time in every if time <= limit)
    axis = {"range": _padded([min(times), high], 0.05 * high)}
    bands = _block_bands([(record["block"], arm) for arm, record in steps])
    above = sum(time > high for time in every)
    caption = "Shaded bands are the interleaved blocks. " if bands else ""
    caption += f"Open markers are {uncounted} steps, left out of all statistics"
    caption += f"; above the axis: {above}." if above else "."
    caption += f" {left_out}" if left_out else ""
    return figure(traces, "step in order of execution", "step time (ms)", yaxis=axis, shapes=bands), caption


def _block_bands(steps: Sequence[tuple[int, str]]) -> list[Figure]:
    """A band behind the steps of each block; two shades, since A B B A puts blocks of one arm side by side."""
    bands: list[Figure] = []
    start = 0
    for (_, arm), block in groupby(steps):
        end = start + len(list(block))
        bands.append(band(arm, 0.1 if len(bands) % 2 else 0.18, x=(start + 0.5, end + 0.5)))
        start = end
    return bands if len(bands) <= MAX_BANDS else []


def distribution(arms: Arms) -> Drawn:
    """Distribution of the timed steps (ms): one box per arm, every step as a point while there are few."""
    traces = [
        {
            "type": "box",
            "name": arm,
            "meta": {"colour": arm},
            "orientation": "h",
            "x": [finite(1000 * record["iteration-time"]) for record in timed(records)],
            "boxpoints": "all" if len(records) <= 500 else "outliers",
            "jitter": 0.5,
            "pointpos": 0,
            "marker": {"symbol": SYMBOLS[arm], "size": 4},
            "showlegend": False,
        }
        for arm, records in reversed(arms.items())  # plotly stacks upwards: the baseline goes on top
        if timed(records)
    ]
    if not traces:
        return None, "No step was timed, so there is no distribution."
    shown = figure(traces, "step time (ms)", "", height=260)
    return shown, "Line: median. Box: the middle half of the timed steps. Whiskers: 1.5 times the box's length."


def block_speedups(arms: Arms, interval: Sequence[Any] | None, speedup: Any) -> Drawn:
    """Baseline / flux step time of each pair of neighbouring blocks, with the interval of the whole as a band."""
    pairs = enumerate(paired_blocks(arms["baseline"], arms["flux"]), 1)
    ratios = [(number, float(np.median(baseline) / np.median(flux))) for number, (baseline, flux) in pairs]
    ratios = [(number, ratio) for number, ratio in ratios if math.isfinite(ratio)]
    if not isinstance(speedup, int | float):
        return None, "Not both arms have been timed, so there is no speed-up."
    if interval is not None and not all(isinstance(end, int | float) for end in interval):
        interval = None  # a step time that is not finite
    if len(ratios) < 2:
        return None, "Fewer than two pairs of blocks were timed in both arms, so pairs cannot be compared."
    shapes = [line("text", y=1.0, dash="dash"), line("flux", y=speedup)]
    caption = "Each point: median step time of one baseline block / of its flux neighbour; above 1 flux is faster. "
    caption += "Line: the speed-up over all timed steps."
    if interval is not None:
        shapes.append(band("flux", 0.2, y=interval))
        caption += " Band: its 95 % interval, a bootstrap that draws whole pairs of blocks."
    x, y = zip(*ratios, strict=True)
    hover = "pair %{x}: %{y:.4g}"
    drawn = trace("pairs of blocks", "flux", x, y, hover, symbol=SYMBOLS["flux"], showlegend=False)
    axis = {"range": _padded([1.0, speedup, *y, *(interval or ())], 0.05)}
    titles = "pair of blocks", "speed-up (baseline / flux)"
    return figure([drawn], *titles, yaxis=axis, shapes=shapes, height=300), caption


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
    names = list(reversed(known))  # plotly stacks upwards: the first goes on top
    traces = [
        bars(name, colour, [known[bar].get(key) or 0.0 for bar in names], names, "%{x:.4g} ms")
        for key, (name, colour) in TIME_PARTS.items()
        if any(known[bar].get(key) for bar in names)
    ]
    # Below the axis: above, a legend of eight entries would cover the bars on a phone.
    legend = {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}
    legend["maxheight"] = 1  # by default a legend that fills half of a figure gets a scroll bar
    margin = {"l": 8, "r": 12, "t": 12, "b": 95}
    height = 44 * len(names)
    narrow = {"height": height + 70 + 20 * len(traces), "margin": {**margin, "b": 55 + 20 * len(traces)}}
    layout = {"barmode": "stack", "bargap": 0.35, "legend": legend, "margin": margin, "height": height + 110}
    layout["meta"] = {"narrow": narrow}  # a phone has one entry of the legend in a line
    return figure(traces, f"ms per {unit}", "", **layout)


def peak_memory(arms: Mapping[str, Mapping[str, Any]], notes: Sequence[str]) -> Drawn:
    """Most memory (GiB) of each arm, allocated and workspace in one bar; ``arms`` and ``notes`` of the summary."""
    known = {arm: found for arm, found in arms.items() if found.get("peak_memory_bytes") is not None}
    why = [note for note in notes if note.startswith("Peak memory of")]
    if not known:
        return None, " ".join(why) or "Peak memory is not known: arms on CPUs share the memory of their processes."
    sizes = {
        (name, colour): {arm: found[key] / 2**30 for arm, found in reversed(known.items())}
        for key, name, colour in (
            ("allocated_peak_bytes", "allocated", "part-gemm"),
            ("workspace_bytes", "workspace", "part-fused"),
        )
    }
    traces = [
        bars(
            name,
            colour,
            list(gib.values()),
            list(gib),
            "%{x:.3f} GiB",
            text=[f"{name} {size:.2f} GiB" if size else "" for size in gib.values()],
            # Beside a bar it would be cut by the edge of a narrow page.
            textposition="inside",
        )
        for (name, colour), gib in sizes.items()
    ]
    each = [f"{arm}: {', '.join(f'{name} {gib[arm]:.2f} GiB' for (name, _), gib in sizes.items())}" for arm in known]
    caption = (
        "Each arm's own on the rank with the most: what torch's allocator held for it, and workspaces in symmetric "
        f"memory. {' '.join(['What NCCL and CUDA themselves take is in neither.', *why])} {'; '.join(each)}."
    )
    axis = {"rangemode": "tozero"}
    text = {"minsize": 9, "mode": "hide"}  # where it does not fit, the caption has it
    return figure(traces, "peak memory (GiB)", "", xaxis=axis, height=220, barmode="stack", uniformtext=text), caption


def efficiencies(rows: Sequence[str], methods: Mapping[str, tuple[str, str, Sequence[float | None]]]) -> Drawn:
    """Overlap efficiency (%) of several methods, one row of points for each of ``rows``.

    Args:
        rows: what each row is called; ``<br>`` breaks its line.
        methods: colour, marker and the value of each row (a fraction, or None) by the method's name.
    """
    every = [value for *_, values in methods.values() for value in values if finite(value) is not None]
    if not every:
        return None, "No overlap efficiency is known: there is nothing to hide, or it was not measured."
    names = list(reversed(rows))  # plotly counts upwards: the first goes on top
    traces = []
    for name, (colour, symbol, values) in methods.items():
        shown = [finite(value) for value in reversed(values)]
        if any(value is not None for value in shown):
            x = [None if value is None else 100 * min(max(value, LOW), HIGH) for value in shown]
            exact = [None if value is None else 100 * value for value in shown]
            hover = f"{name} %{{customdata:.0f}} %"
            traces.append(trace(name, colour, x, names, hover, symbol=symbol, customdata=exact))
    caption = "100 %: as fast as the GEMM alone; 0 %: as slow as GEMM and communication in turn."
    for cut, edge in (
        (sum(value < LOW for value in every), f"below {MINUS}{-100 * LOW:.0f} %"),
        (sum(value > HIGH for value in every), f"above {100 * HIGH:.0f} %"),
    ):
        caption += f" {counted(cut, 'point')} {edge} at the edge." if cut else ""
    least, most = max(min(every), LOW), min(max(every), HIGH)
    axis = {"range": [100 * min(least, 0) - 8, 100 * max(most, 1) + 8], "nticks": 5, "tickfont": {"size": 11}}
    lines = [line("quiet", x=0, dash="dash"), line("quiet", x=100, dash="dash")]
    height = 130 + (10 + 15 * max(row.count("<br>") + 1 for row in rows)) * len(rows)
    layout = {"xaxis": axis, "yaxis": row_axis(len(rows)), "shapes": lines, "height": height}
    return figure(traces, "overlap efficiency (%)", "", **layout), caption


def row_axis(rows: int) -> Figure:
    """A y axis of named rows."""
    return {"tickfont": {"size": 11}, "range": [-0.6, rows - 0.4]}
