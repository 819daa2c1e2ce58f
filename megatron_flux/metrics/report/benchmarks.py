"""The chapters of ``bench ops`` and ``bench layer`` folders."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from megatron_flux.metrics.report.figures import efficiencies, label, time_parts
from megatron_flux.metrics.report.render import Chapter, Part, Table, settings_parts
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import overlap_efficiency
from megatron_flux.metrics.table import CROSS, connections, finite, link, multicast, percent, shown

Row = Mapping[str, Any]

OPERATORS = {"all_gather_gemm": "All-gather + GEMM", "gemm_reduce_scatter": "GEMM + reduce-scatter"}
METHODS = {  # column of the summary: name, colour, marker
    "async_tp_ms": ("torch async-TP", "other", "circle-open"),
    "fused_ms": ("fused", "baseline", "square-open"),
    "tuned_ms": ("tuned", "flux", "diamond"),
}
TIMES = {"gemm_ms": "GEMM", "serial_ms": "in turn", "async_tp_ms": "async-TP", "fused_ms": "fused", "tuned_ms": "tuned"}
OWN = "async_tp_own"
"""What async-TP took in a pass of its own with another number of hardware queues: an object like a row."""


def operators_chapter(run: Run, id_: str) -> Chapter:
    """Overlap efficiency of every method per call, and the times behind it."""
    rows = run.summary["rows"]
    queues = run.summary.get("async_tp_connections")
    caption = "Median over rounds of the slowest rank, all methods interleaved in one run; n and k are the rank's own."
    if queues:
        caption += (
            f" Async-TP with CUDA_DEVICE_MAX_CONNECTIONS {queues} was measured by itself afterwards; its E is by the "
            "GEMM and the time in turn of that pass."
        )
    elif shared := connections(_environment(run)):
        caption += f" Async-TP ran with {shared} as all methods did, which may not be its best."
    own = [f"async-TP, {queues} queues"] if queues else []
    head = ("call", f"m {CROSS} n {CROSS} k", *TIMES.values(), "E tuned", *own)
    parts: list[Part] = []
    for op, title in OPERATORS.items():
        if calls := [row for row in rows if row["op"] == op]:
            names = [label(_call(row, "\n")).replace("\n", "<br>") for row in calls]
            points = {
                name: (colour, symbol, [_efficiency(row, key) for row in calls])
                for key, (name, colour, symbol) in METHODS.items()
            }
            if queues:
                values = [_efficiency(row.get(OWN) or {}, "async_tp_ms") for row in calls]
                points[f"torch async-TP, {queues} queues"] = ("other", "circle", values)
            times = [
                (
                    _call(row, " "),
                    f" {CROSS} ".join(str(row[name]) for name in "mnk"),
                    *(shown(row.get(key), "{:.3f}".format) for key in TIMES),
                    shown(_efficiency(row, "tuned_ms"), percent),
                    *(shown((row.get(OWN) or {}).get("async_tp_ms"), "{:.3f}".format) for _ in own),
                )
                for row in calls
            ]
            parts.append(Part(f"e-{op}", f"{title}: overlap efficiency", *efficiencies(names, points)))
            parts.append(Part(f"ms-{op}", f"{title}: milliseconds", table=Table(times, head), caption=caption))
    if not rows:
        parts.append(Part("empty", "Calls", caption="No call has been measured."))
    return chapter_of(run, id_, "operators", parts)


def _efficiency(row: Row, method: str) -> float | None:
    times = (row.get(name) for name in (method, "gemm_ms", "serial_ms"))
    return overlap_efficiency(*(time if finite(time) else None for time in times))


def _call(row: Row, separator: str) -> str:
    which = f"{row.get('direction', '?')}, m {row['m']}{_fp8(row)}"
    return f"{row.get('model', '?')} {row.get('layer', '?')}{separator}{which}"


def layers_chapter(run: Run, id_: str) -> Chapter:
    """Where the time of each arm goes, one figure and table per workload."""
    traced = (
        "One traced step of rank 0. ¹ Communication beside which nothing else ran. "
        f"{FUSED_WAITS} The floor skips all communication: no training."
    )
    caption = (
        "Median over rounds of the slowest rank (quartiles). Hidden: share of what no communication would save. "
        f"¹ {FUSED_WAITS}"
    )
    head = ("arm", "ms per layer", "against te", "hidden", "exposed ms ¹", "peak GB")
    parts: list[Part] = []
    for number, (title, group) in enumerate(groupby(run.summary["rows"], key=_workload), 1):
        rows = list(group)
        # By the names that a training run's breakdown.json has for them.
        breakdowns = {
            label(row["arm"]): {k.removesuffix("_ms"): ms for k, ms in row["breakdown"].items() if finite(ms)}
            for row in rows
        }
        figure = time_parts(breakdowns, "layer")
        about = traced if figure else "No step was traced, so where the time went is not known."
        parts.append(Part(f"time-{number}", f"{title}: where the time goes", figure, about))
        cells = [
            (
                row["arm"],
                f"{row['ms_per_layer']:.2f} ({row['ms_per_layer_low']:.2f}…{row['ms_per_layer_high']:.2f})",
                shown(row.get("speedup_vs_te"), f"{{:.3f}}{CROSS}".format),
                shown(row.get("hidden_share"), percent),
                shown(row["breakdown"].get("communication_exposed_ms"), "{:.2f}".format),
                shown(row.get("peak_memory_gb"), "{:.1f}".format),
            )
            for row in rows
        ]
        title = f"{title}, {max(rows[0].get('layers') or 1, 1)} layers"
        parts.append(Part(f"layers-{number}", title, table=Table(cells, head), caption=caption))
    skipped = [(f"{_workload(s)}: {s['arm']}", s["reason"]) for s in run.summary.get("skipped", [])]
    if skipped:
        parts.append(Part("skipped", "Not measured", table=Table(skipped)))
    return chapter_of(run, id_, "layers, forward and backward", parts)


def _workload(row: Row) -> str:
    how = "" if row.get("sequence_parallel", True) else ", no sequence parallelism"
    how += ", frozen" if row.get("frozen") else ""
    return f"{row['model']}, {row['seq']} {CROSS} {row['micro_batch']}{_fp8(row)}{how}"


def _fp8(row: Row) -> str:
    return f", FP8 {row['fp8']}" if row.get("fp8") else ""


def _environment(run: Run) -> Mapping[str, Any] | None:
    found = run.summary.get("environment")
    return found if isinstance(found, Mapping) else None


def chapter_of(run: Run, id_: str, what: str, parts: list[Part]) -> Chapter:
    """With the conditions of the benchmark as subtitle, and its damage and settings behind its own parts."""
    summary, environment = run.summary, _environment(run)
    userbuffers = any(row.get("arm") == "te_ub" for row in summary["rows"])
    conditions = (
        f"{what}; {summary.get('tp', '?')} {CROSS} {summary.get('device', '?')}",
        link(summary),
        multicast(environment, userbuffers=userbuffers),
        connections(environment),
    )
    if run.problems:
        parts.append(Part("damage", "Damage", table=Table([("damage", text) for text in run.problems])))
    known = {name: summary.get(name) for name in ("versions", "environment")} | {"configuration": run.settings}
    settings = settings_parts({name: value for name, value in known.items() if isinstance(value, Mapping)})
    return Chapter(id_, run.name, run.verdict, ", ".join(filter(None, conditions)), [*parts, *settings])
