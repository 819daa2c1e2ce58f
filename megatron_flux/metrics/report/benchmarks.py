"""The chapters of ``bench ops`` and ``bench layer`` folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_flux.metrics.conditions import connections, multicast
from megatron_flux.metrics.redact import without_secrets
from megatron_flux.metrics.report import figures_bars
from megatron_flux.metrics.report.differences import flat
from megatron_flux.metrics.report.figures import label
from megatron_flux.metrics.report.parts import Chapter, Part, Table
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.rows import CROSS, MINUS, UNKNOWN
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.statistics import overlap_efficiency

OPERATORS = {"all_gather_gemm": "All-gather + GEMM", "gemm_reduce_scatter": "GEMM + reduce-scatter"}
METHODS = {  # column of the summary: name, colour, marker
    "async_tp_ms": ("torch async-TP", "other", "circle-open"),
    "fused_ms": ("fused", "baseline", "square-open"),
    "tuned_ms": ("tuned", "flux", "diamond"),
}


def operators_chapter(run: Run, id_: str) -> Chapter:
    """Overlap efficiency of every method per call, and the times behind it."""
    rows = run.summary["rows"]
    parts: list[Part] = []
    queues = run.summary.get("async_tp_connections")
    methods_of = {**METHODS, **({OWN: (f"torch async-TP, {queues} queues", "other", "circle")} if queues else {})}
    for op, title in OPERATORS.items():
        calls = [row for row in rows if row["op"] == op]
        if not calls:
            continue
        methods = {
            name: (
                colour,
                symbol,
                [_efficiency(row, key) for row in calls],
            )
            for key, (name, colour, symbol) in methods_of.items()
        }
        figure, caption = figures_bars.efficiencies(
            [label(_call(row, "\n")).replace("\n", "<br>") for row in calls], methods
        )
        parts.append(Part(f"e-{op}", f"{title}: overlap efficiency", figure, caption))
        said = f"{TIMES} {OWN_CAPTION.format(queues)}" if queues else f"{TIMES} {_queues(run)}"
        parts.append(Part(f"ms-{op}", f"{title}: milliseconds", table=_times(calls, queues), caption=said.strip()))
    if not rows:
        parts.append(Part("empty", "Calls", caption="No call has been measured."))
    return Chapter(id_, run.name, run.verdict, f"operators; {_where(run)}", [*parts, *_around(run)])


OWN = "async_tp_own"
OWN_CAPTION = (
    "Async-TP with CUDA_DEVICE_MAX_CONNECTIONS {} was measured by itself afterwards; its E is by the GEMM and the time "
    "in turn of that pass."
)
TIMES = "Median over rounds of the slowest rank, all methods interleaved in one run; n and k are the rank's own."


def _queues(run: Run) -> str:
    """Beside async-TP's figures where it was not given its own number of hardware queues."""
    shared = connections(_environment(run))
    return f"Async-TP ran with {shared} as all methods did, which may not be its best." if shared else ""


def _times(calls: Sequence[Mapping[str, Any]], queues: object) -> Table:
    keys = {
        "gemm_ms": "GEMM",
        "serial_ms": "in turn",
        "async_tp_ms": "async-TP",
        "fused_ms": "fused",
        "tuned_ms": "tuned",
    }
    return Table(
        [
            (
                _call(row, " "),
                f" {CROSS} ".join(str(row[name]) for name in "mnk"),
                *(_number(row.get(key), "{:.3f}") for key in keys),
                _percent(_efficiency(row, "tuned_ms")),
                *([_number((row.get(OWN) or {}).get("async_tp_ms"), "{:.3f}")] if queues else []),
            )
            for row in calls
        ],
        head=(
            "call",
            f"m {CROSS} n {CROSS} k",
            *keys.values(),
            "E tuned",
            *([f"async-TP, {queues} queues"] if queues else []),
        ),
    )


def _efficiency(row: Mapping[str, Any], method: str) -> float | None:
    if method == OWN:
        own = row.get(OWN)
        return _efficiency(own, "async_tp_ms") if isinstance(own, Mapping) else None
    time = row.get(method)
    return overlap_efficiency(time if _is_number(time) else None, row["gemm_ms"], row["serial_ms"])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _call(row: Mapping[str, Any], separator: str) -> str:
    return f"{row.get('model', '?')} {row.get('layer', '?')}{separator}{row.get('direction', '?')}, m {row['m']}"


def layers_chapter(run: Run, id_: str) -> Chapter:
    """Where the time of each arm goes, one figure and table per workload."""
    parts: list[Part] = []
    for number, (title, group) in enumerate(groupby(run.summary["rows"], key=_workload), 1):
        rows = list(group)
        breakdowns = {label(row["arm"]): _parts(row["breakdown"]) for row in rows}
        layers = max(rows[0].get("layers") or 1, 1)
        figure, _ = figures_bars.time_parts(breakdowns, "layer")
        caption = f"{TRACED} {UNCOUNTED}" if figure else "No step was traced, so nobody knows where the time went."
        parts.append(Part(f"time-{number}", f"{title}: where the time goes", figure, caption))
        parts.append(Part(f"layers-{number}", f"{title}, {layers} layers", table=_layers(rows), caption=LAYERS))
    skipped = [(f"{_workload(s)}: {s['arm']}", s["reason"]) for s in run.summary.get("skipped", [])]
    if skipped:
        parts.append(Part("skipped", "Not measured", table=Table(skipped)))
    return Chapter(id_, run.name, run.verdict, f"layers, forward and backward; {_where(run)}", [*parts, *_around(run)])


TRACED = "One traced step of rank 0. ¹ Communication beside which nothing else ran."
UNCOUNTED = f"{FUSED_WAITS} The floor skips all communication: no training."
LAYERS = (
    "Median over rounds of the slowest rank (quartiles). Hidden: share of what no communication would save. "
    f"¹ {FUSED_WAITS}"
)


def _parts(breakdown: Mapping[str, Any]) -> dict[str, float]:
    """The parts by the names that a training run's ``breakdown.json`` has for them."""
    return {name.removesuffix("_ms"): value for name, value in breakdown.items() if _is_number(value)}


def _workload(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['seq']} {CROSS} {row['micro_batch']}"


def _layers(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        [
            (
                row["arm"],
                f"{row['ms_per_layer']:.2f} ({row['ms_per_layer_low']:.2f}…{row['ms_per_layer_high']:.2f})",
                _number(row.get("speedup_vs_te"), "{:.3f}" + CROSS),
                _percent(row.get("hidden_share")),
                _number(row["breakdown"].get("communication_exposed_ms"), "{:.2f}"),
                _number(row.get("peak_memory_gb"), "{:.1f}"),
            )
            for row in rows
        ],
        head=("arm", "ms per layer", "against te", "hidden", "exposed ms ¹", "peak GB"),
    )


def _number(value: Any, form: str) -> str:
    return form.format(value) if _is_number(value) else UNKNOWN


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %".replace("-", MINUS) if _is_number(value) else UNKNOWN


def _environment(run: Run) -> Mapping[str, Any] | None:
    found = run.summary.get("environment")
    return found if isinstance(found, Mapping) else None


def _where(run: Run) -> str:
    summary = run.summary
    known = _environment(run)
    ran = any(row.get("arm") == "te_ub" for row in summary["rows"])
    return ", ".join(
        part
        for part in (
            f"{summary.get('tp', '?')} {CROSS} {summary.get('device', '?')}",
            str(summary.get("link", "?")),
            multicast(known, userbuffers=ran),
            connections(known),
        )
        if part
    )


def _around(run: Run) -> list[Part]:
    found = [
        *([Part("damage", "Damage", table=Table([("damage", text) for text in run.problems]))] if run.problems else [])
    ]
    known = {"versions": run.summary.get("versions"), "environment": run.summary.get("environment")}
    known["configuration"] = run.settings
    for name, value in known.items():
        if isinstance(value, Mapping) and (pairs := list(flat(without_secrets(value)))):
            found.append(Part(name, name.capitalize(), table=Table(pairs), folded=True))
    return found
