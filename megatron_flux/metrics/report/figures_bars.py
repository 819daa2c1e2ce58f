"""Bars: peak memory, where the time goes; and points on a line: overlap efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_flux.metrics.report.figures import Drawn, counted, figure, finite, line
from megatron_flux.metrics.rows import MINUS

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


MEMORY_PARTS = {"allocated_peak_bytes": ("allocated", "part-gemm"), "workspace_bytes": ("workspace", "part-fused")}
"""Of an arm in the summary: name and colour."""


def peak_memory(arms: Mapping[str, Mapping[str, Any]], notes: Sequence[str] = ()) -> Drawn:
    """Most memory (GiB) of each arm, allocated and workspace in one bar; ``arms`` and ``notes`` of the summary."""
    known = {arm: found for arm, found in reversed(arms.items()) if found.get("peak_memory_bytes") is not None}
    why = [note for note in notes if note.startswith("Peak memory of")]
    if not known:
        return None, " ".join(why) or "Peak memory is not known: arms on CPUs share the memory of their processes."
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "meta": {"colour": colour},
            "x": [found[key] / 2**30 for found in known.values()],
            "y": list(known),
            "text": [f"{name} {found[key] / 2**30:.2f} GiB" if found[key] else "" for found in known.values()],
            # Beside a bar it would be cut by the edge of a narrow page.
            "textposition": "inside",
            "hovertemplate": f"%{{y}}: {name} %{{x:.3f}} GiB<extra></extra>",
        }
        for key, (name, colour) in MEMORY_PARTS.items()
    ]
    caption = (
        "Each arm's own on the rank with the most: what torch's allocator held for it, and workspaces in symmetric "
    )
    caption += " ".join(["memory. What NCCL and CUDA themselves take is in neither.", *why])
    parts = [
        f"{arm}: " + ", ".join(f"{name} {found[key] / 2**30:.2f} GiB" for key, (name, _) in MEMORY_PARTS.items())
        for arm, found in reversed(known.items())
    ]
    caption += f" {'; '.join(parts)}."
    axis = {"rangemode": "tozero"}
    text = {"minsize": 9, "mode": "hide"}  # where it does not fit, the caption has it
    return figure(traces, "peak memory (GiB)", "", xaxis=axis, height=220, barmode="stack", uniformtext=text), caption


def time_parts(breakdowns: Mapping[str, Mapping[str, float]], unit: str) -> Drawn:
    """Stacked bars of :data:`TIME_PARTS` (ms per ``unit``), one bar for each named breakdown; nothing to say."""
    known = {name: parts for name, parts in breakdowns.items() if any(parts.get(key) for key in TIME_PARTS)}
    if not known:
        return None, ""
    names = list(reversed(known))  # plotly stacks upwards: the first goes on top
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "meta": {"colour": colour},
            "x": [known[name].get(key) or 0.0 for name in names],
            "y": names,
            "hovertemplate": f"%{{y}}: {label} %{{x:.4g}} ms<extra></extra>",
        }
        for key, (label, colour) in TIME_PARTS.items()
        if any(known[name].get(key) for name in names)
    ]
    # Below the axis: above, a legend of eight entries would cover the bars on a phone.
    legend = {"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}
    legend["maxheight"] = 1  # by default a legend that fills half of a figure gets a scroll bar
    margin = {"l": 8, "r": 12, "t": 12, "b": 95}
    bars = 44 * len(names)
    narrow = {"height": bars + 70 + 20 * len(traces), "margin": {**margin, "b": 55 + 20 * len(traces)}}
    layout = {"barmode": "stack", "bargap": 0.35, "legend": legend, "margin": margin, "height": bars + 110}
    layout["meta"] = {"narrow": narrow}  # a phone has one entry of the legend in a line
    return figure(traces, f"ms per {unit}", "", **layout), ""


LOW, HIGH = -1.0, 1.5
"""Overlap efficiencies beyond these are drawn at the edge: one far away would leave no room for the others."""


def efficiencies(rows: Sequence[str], methods: Mapping[str, tuple[str, str, Sequence[float | None]]]) -> Drawn:
    """Overlap efficiency (%) of several methods, one row of points for each of ``rows``.

    Args:
        rows: what each row is called; ``<br>`` breaks its line.
        methods: colour, marker and the value of each row (a fraction, or None) by the method's name.
    """
    every = [value for *_, values in methods.values() for value in values if finite(value) is not None]
    if not every:
        return None, "No overlap efficiency is known: there is nothing to hide, or it was not measured."
    order = list(reversed(range(len(rows))))  # plotly counts upwards: the first goes on top
    traces = []
    for name, (colour, symbol, values) in methods.items():
        shown = [finite(values[i]) for i in order]
        if all(value is None for value in shown):
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "meta": {"colour": colour},
                "x": [None if value is None else 100 * min(max(value, LOW), HIGH) for value in shown],
                "y": [rows[i] for i in order],
                "customdata": [None if value is None else 100 * value for value in shown],
                "hovertemplate": f"{name} %{{customdata:.0f}} %<extra></extra>",
                "marker": {"symbol": symbol, "size": 9},
            }
        )
    caption = "100 %: as fast as the GEMM alone; 0 %: as slow as GEMM and communication in turn."
    for cut, edge in (
        (sum(value < LOW for value in every), f"below {MINUS}{-100 * LOW:.0f} %"),
        (sum(value > HIGH for value in every), f"above {100 * HIGH:.0f} %"),
    ):
        caption += f" {counted(cut, 'point')} {edge} at the edge." if cut else ""
    least, most = max(min(every), LOW), min(max(every), HIGH)
    bounds = [100 * min(least, 0) - 8, 100 * max(most, 1) + 8]
    axis = {"range": bounds, "nticks": 5, "tickfont": {"size": 11}}
    names = {"tickfont": {"size": 11}, "range": [-0.6, len(rows) - 0.4]}
    lines = [line("quiet", x=0, dash="dash"), line("quiet", x=100, dash="dash")]
    height = 130 + (10 + 15 * max(row.count("<br>") + 1 for row in rows)) * len(rows)
    return figure(traces, "overlap efficiency (%)", "", xaxis=axis, yaxis=names, shapes=lines, height=height), caption
