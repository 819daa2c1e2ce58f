"""The chapter of a ``bench inference`` folder: how much faster than stock each arm is, and the times behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_flux.metrics.report.benchmarks import chapter_of
from megatron_flux.metrics.report.figures import figure_of, label, trace_of
from megatron_flux.metrics.report.render import Chapter, Figure, Part, Table
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.table import CROSS, finite, shown

Row = Mapping[str, Any]

LOOKS = {  # colour and marker of an arm; of any other one those of the last
    "flux_te": ("flux", "diamond"),
    "flux_local": ("flux", "diamond-open"),
    "flux": ("flux", "diamond"),
    "folded_int4": ("flux", "diamond"),
    "te": ("baseline", "square"),
    "local": ("baseline", "square-open"),
    "stock": ("baseline", "square"),
    "naive_int4": ("baseline", "square"),
    "floor": ("other", "circle-open"),
}
CAPTION = (
    "Median over rounds of the slowest rank (quartiles), all arms interleaved in one run. Against stock: over the "
    "faster of te and local, over cuBLAS with NCCL, or over the plain int4 form. The floor leaves communication out: "
    "its numbers are wrong. Attention sees the tokens of the pass alone"
)
CACHE = "; that of a decode step also the {} tokens of its sequence's cache of keys and values."


def inference_chapter(run: Run, id_: str) -> Chapter:
    """A figure and a table per kind; on CPUs, where nothing was measured, tables alone."""
    summary = run.summary
    note, context = summary.get("note"), summary.get("context_length")
    told = CAPTION + (CACHE.format(context) if context else ": there is no cache of keys and values.")
    parts: list[Part] = []
    for kind, group in groupby(summary["rows"], key=lambda row: row["kind"]):
        rows = list(group)
        if not note and (figure := _speedups(rows)):
            parts.append(Part(f"speed-up-{kind}", f"{kind}: against stock", figure, told))
        cells = [
            (
                _case(row),
                row["arm"],
                f"{row['ms']:.4f} ({row['ms_low']:.4f}…{row['ms_high']:.4f})",
                *(() if note else (shown(row.get("speedup_vs_stock"), f"{{:.3f}}{CROSS}".format),)),
            )
            for row in rows
        ]
        head = ("case", "arm", "ms", *(() if note else ("against stock",)))
        caption = f"{note}. {told}" if note else told
        parts.append(Part(f"ms-{kind}", f"{kind}: milliseconds", table=Table(cells, head), caption=caption))
    if not summary["rows"]:
        parts.append(Part("empty", "Passes", caption="Nothing has been measured."))
    known = [one for one in summary.get("skipped", []) if isinstance(one, Mapping) and "reason" in one]
    skipped = dict.fromkeys(
        (" ".join(str(one[name]) for name in ("kind", "model", "arm") if name in one), str(one["reason"]))
        for one in known
    )
    if skipped:
        parts.append(Part("skipped", "Not measured", table=Table(list(skipped))))
    return chapter_of(run, id_, "inference", parts)


def _case(row: Row) -> str:
    what = f"{row['layers']} layer(s), " if "layers" in row else f"{row['layer']}, " if "layer" in row else ""
    return f"{row['model']}, {what}m {row['m']}"


def _speedups(rows: Sequence[Row]) -> Figure | None:
    """Points of one kind, a row of them per case."""
    known = [row for row in rows if finite(row.get("speedup_vs_stock"))]
    if not known:
        return None
    names = list(dict.fromkeys(label(_case(row)) for row in reversed(known)))  # plotly counts upwards
    traces = []
    for arm in dict.fromkeys(row["arm"] for row in known):
        points = [(row["speedup_vs_stock"], label(_case(row)), row["ms"]) for row in known if row["arm"] == arm]
        colour, symbol = LOOKS.get(arm, LOOKS["floor"])
        hover = f"%{{y}}: {label(arm)} %{{x:.3f}}{CROSS}, %{{customdata[0]:.4g}} ms"
        traces.append(trace_of(label(arm), colour, points, hover, symbol))
    axis = {"tickfont": {"size": 11}, "categoryorder": "array", "categoryarray": names}
    line = {"width": 1, "dash": "dash", "color": "var(--quiet)"}
    dashed = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": line}
    return figure_of(traces, "times as fast as stock", "", yaxis=axis, height=130 + 25 * len(names), shapes=[dashed])
