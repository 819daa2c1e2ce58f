"""The report's figures as plotly JSON: plain dicts, validated against plotly's schema by the tests.

Colours are not in here. A trace says which arm it shows (``meta.arm``) and the page's script paints it from the page's
CSS variables, so that one file serves light, dark and print. The arms differ in width and marker too: not by colour
alone. Numbers are finite or None (a gap); what a gap hides is said in the caption.

A figure function returns ``(figure or None, caption)``: without data there is no figure, and the caption says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_flux.metrics.statistics import Record, relative_differences, timed

Arms = Mapping[str, Sequence[Record]]
Figure = dict[str, Any]

MAX_BANDS = 400
"""More block bands than this are thinner than a pixel, and slow."""

# Curves of the two arms usually lie on each other: a wide pale band with a thin line on it shows both.
_STYLE = {
    "baseline": {"width": 7, "opacity": 0.45, "symbol": "circle"},
    "flux": {"width": 2, "opacity": 1, "symbol": "diamond"},
}


def _figure(traces: list[Figure], x: str, y: str, **layout: Any) -> Figure:
    axes = {
        "xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False, **layout.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, "automargin": True, "zeroline": False, **layout.pop("yaxis", {})},
    }
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    margin = {"l": 8, "r": 12, "t": 36 if any(trace.get("showlegend", True) for trace in traces) else 12, "b": 8}
    return {"data": traces, "layout": {"legend": legend, "margin": margin, "height": 360, **axes, **layout}}


def _iterations(count: int) -> str:
    return f"{count} iteration{'' if count == 1 else 's'}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def step_times(arms: Arms) -> tuple[Figure | None, str]:
    """Step time (ms) over the order of execution, blocks as bands behind the points, warm-up as open markers."""
    steps = sorted(
        ((record["block"], record["iteration"], arm, record) for arm, records in arms.items() for record in records),
        key=lambda step: step[:3],
    )
    times = [1000 * record["iteration-time"] for records in arms.values() for record in timed(records)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    traces: list[Figure] = []
    for arm in arms:
        for warmup in (False, True):
            shown = [(x, record) for x, (_, _, of, record) in enumerate(steps, 1) if of == arm]
            shown = [(x, record) for x, record in shown if record["warmup"] is warmup]
            if not shown:
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"{arm}, warm-up" if warmup else arm,
                    "meta": {"arm": arm},
                    "x": [x for x, _ in shown],
                    "y": [_finite(1000 * record["iteration-time"]) for _, record in shown],
                    "customdata": [[record["iteration"], record["block"]] for _, record in shown],
                    "hovertemplate": f"{arm} %{{y:.4g}} ms<br>iteration %{{customdata[0]}}, block %{{customdata[1]}}"
                    "<extra></extra>",
                    "marker": {"symbol": _STYLE[arm]["symbol"] + ("-open" if warmup else ""), "size": 7},
                }
            )
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    every = [1000 * record["iteration-time"] for _, _, _, record in steps]
    low, high = min(times), max(time for time in every if time <= 1.25 * max(times))
    pad = 0.08 * (high - low) or 0.05 * high
    bands = _bands([(block, arm) for block, _, arm, _ in steps])
    above = sum(time > high for time in every)
    caption = "Shaded bands are the interleaved blocks. " if bands else ""
    caption += "Open markers are warm-up steps, left out of all statistics"
    caption += f"; above the axis: {above}." if above else "."
    figure = _figure(
        traces,
        "step in order of execution",
        "step time (ms)",
        yaxis={"range": [low - pad, high + pad]},
        shapes=bands,
    )
    return figure, caption


def _bands(steps: Sequence[tuple[int, str]]) -> list[Figure]:
    """A rectangle behind the steps of each block; two shades, since A B B A puts blocks of one arm side by side."""
    bands: list[Figure] = []
    start = 0
    for end in range(1, len(steps) + 1):
        if end == len(steps) or steps[end] != steps[start]:
            bands.append(
                {
                    "type": "rect",
                    "layer": "below",
                    "xref": "x",
                    "yref": "paper",
                    "x0": start + 0.5,
                    "x1": end + 0.5,
                    "y0": 0,
                    "y1": 1,
                    "line": {"width": 0},
                    "opacity": 0.1 if len(bands) % 2 else 0.18,
                    "name": steps[start][1],
                }
            )
            start = end
    return bands if len(bands) <= MAX_BANDS else []


def distribution(arms: Arms) -> tuple[Figure | None, str]:
    """Distribution of the timed steps (ms): one box per arm, every step as a point while there are few."""
    traces = [
        {
            "type": "box",
            "name": arm,
            "meta": {"arm": arm},
            "orientation": "h",
            "x": [_finite(1000 * record["iteration-time"]) for record in timed(records)],
            "boxpoints": "all" if len(records) <= 500 else "outliers",
            "jitter": 0.5,
            "pointpos": 0,
            "marker": {"symbol": _STYLE[arm]["symbol"], "size": 4},
            "showlegend": False,
        }
        for arm, records in reversed(arms.items())  # plotly stacks upwards: the baseline goes on top
        if timed(records)
    ]
    if not traces:
        return None, "No step was timed, so there is no distribution."
    figure = _figure(traces, "step time (ms)", "", height=260)
    return figure, "Line: median. Box: the middle half of the timed steps. Whiskers: 1.5 times the box's length."


def curves(arms: Arms, name: str, unit: str) -> tuple[Figure | None, str]:
    """A field of both arms over the iterations."""
    traces = [
        {
            "type": "scatter",
            "mode": "lines" if len(records) > 1 else "markers",
            "name": arm,
            "meta": {"arm": arm},
            "x": [record["iteration"] for record in records],
            "y": [_finite(record[name]) for record in records],
            "hovertemplate": f"{arm} %{{y:.7g}}<br>iteration %{{x}}<extra></extra>",
            "line": {"width": _STYLE[arm]["width"]},
            "opacity": _STYLE[arm]["opacity"],
        }
        for arm, records in arms.items()
        if any(math.isfinite(record[name]) for record in records)
    ]
    lost = {arm: sum(not math.isfinite(record[name]) for record in records) for arm, records in arms.items()}
    caption = " ".join(
        f"The {arm} {name} is not finite in {_iterations(count)}." for arm, count in lost.items() if count
    )
    caption += "".join(f" The {arm} arm has no records." for arm, records in arms.items() if not records)
    if not traces:
        return None, caption.strip()
    return _figure(traces, "iteration", f"{name} ({unit})" if unit else name), caption.strip()


def difference(arms: Arms, name: str) -> tuple[Figure | None, str]:
    """|flux - baseline| / |baseline| of a field over the iterations both arms have."""
    differences = relative_differences(arms["baseline"], arms["flux"], name)
    if not differences:
        return None, "The arms have no iteration in common, so there is no difference to show."
    finite = [value for _, value in differences if math.isfinite(value)]
    lost = len(differences) - len(finite)
    caption = f"No finite difference in {_iterations(lost)}." if lost else ""
    if not any(finite):
        same = f"The {name} is identical in {_iterations(len(finite))} of {len(differences)}."
        return None, f"{same} {caption}".strip() if finite else caption
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if len(finite) < 100 else "lines",
        "name": "relative difference",
        "meta": {"arm": "text"},
        "x": [iteration for iteration, _ in differences],
        "y": [_finite(value) for _, value in differences],
        "hovertemplate": "%{y:.2e}<br>iteration %{x}<extra></extra>",
        "line": {"width": 2},
        "marker": {"size": 5, "symbol": _STYLE["flux"]["symbol"]},
        "showlegend": False,
    }
    axis = {"tickformat": ".1e", "rangemode": "tozero"}
    return _figure([trace], "iteration", "relative difference (1)", yaxis=axis, height=280), caption


def peak_memory(arms: Arms) -> tuple[Figure | None, str]:
    """Largest allocation (GiB) of each arm, as bars from zero."""
    peaks = {
        arm: [record["peak-memory-bytes"] for record in records if record.get("peak-memory-bytes") is not None]
        for arm, records in arms.items()
    }
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": arm,
            "meta": {"arm": arm},
            "x": [max(values) / 2**30],
            "y": [arm],
            "text": [f"{max(values) / 2**30:.2f} GiB"],
            "hoverinfo": "skip",
            "showlegend": False,
        }
        for arm, values in reversed(peaks.items())
        if values
    ]
    if not traces:
        return None, "Peak memory is not known: this device does not report it."
    axis = {"rangemode": "tozero"}
    return _figure(traces, "peak memory (GiB)", "", xaxis=axis, height=200), "Largest allocation on any rank."


def all_figures(arms: Arms) -> list[dict[str, Any]]:
    """Every figure of the report in order: ``{"id", "title", "figure" or None, "caption"}``."""
    parts = [
        ("step-times", "Step time, in order of execution", step_times(arms)),
        ("distribution", "Step time, distribution", distribution(arms)),
        ("loss", "Loss", curves(arms, "lm loss", "nat/token")),
        ("loss-difference", "Loss, relative difference", difference(arms, "lm loss")),
        ("grad-norm", "Gradient norm", curves(arms, "grad-norm", "")),
        ("memory", "Peak memory", peak_memory(arms)),
    ]
    return [
        {"id": id_, "title": title, "figure": figure, "caption": caption} for id_, title, (figure, caption) in parts
    ]
