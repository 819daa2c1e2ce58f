"""The chapters of ``bench ops`` and ``bench layer`` folders: a figure and a table per group of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_flux.metrics.report.figures import EFFICIENCY, label, points_by_row, time_parts
from megatron_flux.metrics.report.page import Chapter, Part, Table, settings_parts
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import overlap_efficiency
from megatron_flux.metrics.table import CROSS, connections, finite, link, multicast, percent, shown

Row = Mapping[str, Any]

METHODS = {  # column: name, colour, marker
    "async_tp_ms": ("torch async-TP", "other", "circle-open"),
    "fused_ms": ("fused", "baseline", "square-open"),
    "tuned_ms": ("tuned", "flux", "diamond"),
}
TIMES = ("gemm_ms", "serial_ms", *METHODS)
MEDIANS = "Median over rounds of the slowest rank, all variants interleaved in one run."


def chapter(run: Run, id_: str) -> Chapter:
    """Return the chapter of a benchmark: its parts, then damage and settings; the conditions as subtitle."""
    summary, rows = run.summary, run.summary["rows"]
    environment = summary.get("environment")
    environment = environment if isinstance(environment, Mapping) else None
    title_of, make = (lambda row: row["op"], _operators) if run.kind == "operators" else (_workload, _layers)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(title_of(row), []).append(row)
    parts = [make(f"group-{number}", title, of) for number, (title, of) in enumerate(groups.items(), 1)]
    if not rows:
        parts.append(Part("empty", "Rows", caption="Nothing has been measured."))
    skipped = [one for one in summary.get("skipped") or [] if isinstance(one, Mapping) and "reason" in one]
    if skipped:
        names = ("mode", "model", "seq", "micro_batch", "arm")
        pairs = [(" ".join(str(one[n]) for n in names if n in one), str(one["reason"])) for one in skipped]
        parts.append(Part("skipped", "Not measured", table=Table(pairs)))
    if run.problems:
        parts.append(Part("damage", "Damage", table=Table([("damage", text) for text in run.problems])))
    conditions = (
        f"{summary.get('tp', '?')} {CROSS} {summary.get('device', '?')}",
        link(summary),
        multicast(environment, userbuffers=any(row.get("arm") == "te_ub" for row in rows)),
        connections(environment),
    )
    known = {name: summary.get(name) for name in ("versions", "environment")} | {"configuration": run.settings}
    settings = settings_parts({name: value for name, value in known.items() if isinstance(value, Mapping)})
    return Chapter(id_, run.name, run.verdict, ", ".join(filter(None, conditions)), [*parts, *settings])


def _operators(id_: str, title: str, rows: Sequence[Row]) -> Part:
    """Show the overlap efficiency of every method per call, and the times behind it."""
    points = {
        name: (colour, symbol, [None if (e := _efficiency(row, key)) is None else 100 * e for row in rows])
        for key, (name, colour, symbol) in METHODS.items()
    }
    names = [label(_call(row)).replace(", ", "<br>") for row in rows]
    figure = points_by_row(names, points, "overlap efficiency (%)", (0, 100))
    head = ("call", f"m {CROSS} n {CROSS} k", *(name.removesuffix("_ms") for name in TIMES), "E tuned")
    cells = [
        (
            _call(row),
            f" {CROSS} ".join(str(row[name]) for name in "mnk"),
            *(shown(row.get(name), "{:.3f}".format) for name in TIMES),
            shown(_efficiency(row, "tuned_ms"), percent),
        )
        for row in rows
    ]
    caption = f"{EFFICIENCY} {MEDIANS} Times in ms; n and k are the rank's own."
    return Part(id_, title, figure, caption, Table(cells, head))


def _efficiency(row: Row, method: str) -> float | None:
    times = (row.get(name) for name in (method, "gemm_ms", "serial_ms"))
    return overlap_efficiency(*(time if finite(time) else None for time in times))


def _call(row: Row) -> str:
    fp8 = f", FP8 {row['fp8']}" if row.get("fp8") else ""
    return f"{row.get('model', '?')} {row.get('layer', '?')} {row.get('direction', '?')}, m {row['m']}{fp8}"


def _layers(id_: str, title: str, rows: Sequence[Row]) -> Part:
    """Show where the time of each variant goes."""
    # By the names that a training run's breakdown.json has for them.
    traced = [
        {k.removesuffix("_ms"): ms for k, ms in (row.get("breakdown") or {}).items() if finite(ms)} for row in rows
    ]
    figure = time_parts({label(row["arm"]): parts for row, parts in zip(rows, traced, strict=True)}, "layer")
    head = ("variant", "ms per layer", "against te", "hidden", "exposed ms", "peak GB")
    cells = [
        (
            row["arm"],
            f"{row['ms_per_layer']:.2f} ({row['ms_per_layer_low']:.2f}…{row['ms_per_layer_high']:.2f})",
            shown(row.get("speedup_vs_te"), f"{{:.3f}}{CROSS}".format),
            shown(row.get("hidden_share"), percent),
            shown(parts.get("communication_exposed"), "{:.2f}".format),
            shown(row.get("peak_memory_gb"), "{:.1f}".format),
        )
        for row, parts in zip(rows, traced, strict=True)
    ]
    drawn = "Drawn: one traced step of rank 0." if figure else "No step was traced."
    caption = f"{MEDIANS} Hidden: share of what no communication would save. {drawn} {FUSED_WAITS}"
    return Part(id_, title, figure, caption, Table(cells, head))


def _workload(row: Row) -> str:
    words = [f"{row['model']}, {row['seq']} {CROSS} {row['micro_batch']}"]
    words += [f"FP8 {row['fp8']}"] if row.get("fp8") else []
    words += [] if row.get("sequence_parallel", True) else ["no sequence parallelism"]
    words += ["frozen"] if row.get("frozen") else []
    words += [str(row["mode"])] if row.get("mode", "training") != "training" else []
    words += [f"context {row['context_length']}"] if row.get("context_length") else []
    return ", ".join(words)
