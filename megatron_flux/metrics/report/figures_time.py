"""Step times: in order of execution, their distribution, and the speed-up of each pair of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import STYLE, Arms, Drawn, figure, finite, line, thinned
from megatron_flux.metrics.report.parts import Figure
from megatron_flux.metrics.statistics import counts, paired_blocks, timed

MAX_BANDS = 400
"""More block bands than this are thinner than a pixel, and slow."""


def step_times(arms: Arms) -> Drawn:
    """Step time (ms) over the order of execution, blocks as bands behind the points, warm-up as open markers."""
    steps = sorted(
        ((record["block"], record["iteration"], arm, record) for arm, records in arms.items() for record in records),
        key=lambda step: step[:3],
    )
    times = [1000 * record["iteration-time"] for records in arms.values() for record in timed(records)]
    times = [time for time in times if math.isfinite(time)]
    if not times:
        return None, "No step was timed: there are no records, or warm-up steps only."
    profiled = any(record.get("profiled") for _, _, _, record in steps)
    uncounted = "warm-up or profiled" if profiled else "warm-up"
    traces: list[Figure] = []
    left_out = ""
    for arm in arms:
        for counted in (True, False):
            of_arm = [
                (x, 1000 * record["iteration-time"], record["iteration"], record["block"])
                for x, (_, _, of, record) in enumerate(steps, 1)
                if of == arm and counts(record) is counted
            ]
            shown, said = thinned(of_arm)
            left_out = left_out or said
            if not shown:
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": arm if counted else f"{arm}, {uncounted}",
                    "meta": {"colour": arm},
                    "x": [x for x, *_ in shown],
                    "y": [finite(time) for _, time, *_ in shown],
                    "customdata": [[iteration, block] for *_, iteration, block in shown],
                    "hovertemplate": f"{arm} %{{y:.4g}} ms<br>iteration %{{customdata[0]}}, block %{{customdata[1]}}"
                    "<extra></extra>",
                    "marker": {"symbol": STYLE[arm]["symbol"] + ("" if counted else "-open"), "size": 7},
                }
            )
    # The axis is for the steps that count: a first step that compiles kernels would flatten all others.
    every = [1000 * record["iteration-time"] for _, _, _, record in steps]
    low, limit = min(times), 1.25 * max(times)
    high = max(time for time in every if time <= limit)
    pad = 0.08 * (high - low) or 0.05 * high
    bands = _bands([(block, arm) for block, _, arm, _ in steps])
    above = sum(time > high for time in every)
    caption = "Shaded bands are the interleaved blocks. " if bands else ""
    caption += f"Open markers are {uncounted} steps, left out of all statistics"
    caption += f"; above the axis: {above}." if above else "."
    caption += f" {left_out}" if left_out else ""
    shown = figure(
        traces,
        "step in order of execution",
        "step time (ms)",
        yaxis={"range": [low - pad, high + pad]},
        shapes=bands,
    )
    return shown, caption


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
            "marker": {"symbol": STYLE[arm]["symbol"], "size": 4},
            "showlegend": False,
        }
        for arm, records in reversed(arms.items())  # plotly stacks upwards: the baseline goes on top
        if timed(records)
    ]
    if not traces:
        return None, "No step was timed, so there is no distribution."
    shown = figure(traces, "step time (ms)", "", height=260)
    return shown, "Line: median. Box: the middle half of the timed steps. Whiskers: 1.5 times the box's length."


def speedups(arms: Arms, interval: Sequence[Any] | None, speedup: Any) -> Drawn:
    """Baseline / flux step time of each pair of neighbouring blocks, with the interval of the whole as a band."""
    ratios = [
        (number, float(np.median(baseline) / np.median(flux)))
        for number, (baseline, flux) in enumerate(paired_blocks(arms["baseline"], arms["flux"]), 1)
    ]
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
        band: dict[str, Any] = {"type": "rect", "layer": "below", "xref": "paper", "x0": 0, "x1": 1}
        band |= {"y0": interval[0], "y1": interval[1], "line": {"width": 0}, "opacity": 0.2, "name": "flux"}
        shapes.append(band)
        caption += " Band: its 95 % interval, a bootstrap that draws whole pairs of blocks."
    trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "pairs of blocks",
        "meta": {"colour": "flux"},
        "x": [number for number, _ in ratios],
        "y": [ratio for _, ratio in ratios],
        "hovertemplate": "pair %{x}: %{y:.4g}<extra></extra>",
        "marker": {"symbol": STYLE["flux"]["symbol"], "size": 9},
        "showlegend": False,
    }
    values = [1.0, speedup, *(ratio for _, ratio in ratios), *(interval or ())]
    pad = 0.08 * (max(values) - min(values)) or 0.05
    axis = {"range": [min(values) - pad, max(values) + pad]}
    return figure([trace], "pair of blocks", "speed-up (baseline / flux)", yaxis=axis, shapes=shapes, height=300), (
        caption
    )
