"""The chapters of ``bench ops``, ``bench layer`` and ``bench inference`` folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_flux.metrics.report.figures import efficiencies, label, points_by_row, time_parts
from megatron_flux.metrics.report.page import Chapter, Figure, Part, Table, settings_parts
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
TIMES = {"gemm_ms": "GEMM", "serial_ms": "serial", "async_tp_ms": "async-TP", "fused_ms": "fused", "tuned_ms": "tuned"}
LOOKS = {  # colour and marker of a variant in inference benchmarks
    "flux_te": ("flux", "diamond"),
    "flux_local": ("flux", "diamond-open"),
    "flux": ("flux", "diamond"),
    "te": ("baseline", "square"),
    "local": ("baseline", "square-open"),
    "stock": ("baseline", "square"),
}
MEDIANS = "Median over rounds of the slowest rank (quartiles), all variants interleaved in one run."


def chapter(run: Run, id_: str) -> Chapter:
    """Return the chapter of a benchmark: its parts, then damage and settings; the conditions as subtitle."""
    what, make = {
        "operators": ("operators", _operators),
        "layers": ("layers, forward and backward", _layers),
        "inference": ("inference", _inference),
    }[run.kind]
    summary, parts = run.summary, make(run.summary)
    environment = summary.get("environment")
    environment = environment if isinstance(environment, Mapping) else None
    if not summary["rows"]:
        parts.append(Part("empty", "Rows", caption="Nothing has been measured."))
    skipped = [one for one in summary.get("skipped") or [] if isinstance(one, Mapping) and "reason" in one]
    if skipped:
        names = ("kind", "model", "seq", "arm")
        pairs = [(" ".join(str(one[n]) for n in names if n in one), str(one["reason"])) for one in skipped]
        parts.append(Part("skipped", "Not measured", table=Table(list(dict.fromkeys(pairs)))))
    if run.problems:
        parts.append(Part("damage", "Damage", table=Table([("damage", text) for text in run.problems])))
    conditions = (
        f"{what}; {summary.get('tp', '?')} {CROSS} {summary.get('device', '?')}",
        link(summary),
        multicast(environment, userbuffers=any(row.get("arm") == "te_ub" for row in summary["rows"])),
        connections(environment),
    )
    known = {name: summary.get(name) for name in ("versions", "environment")} | {"configuration": run.settings}
    settings = settings_parts({name: value for name, value in known.items() if isinstance(value, Mapping)})
    return Chapter(id_, run.name, run.verdict, ", ".join(filter(None, conditions)), [*parts, *settings])


def _operators(summary: Mapping[str, Any]) -> list[Part]:
    """Show the overlap efficiency of every method per call, and the times behind it."""
    head = ("call", f"m {CROSS} n {CROSS} k", *TIMES.values(), "E tuned")
    caption = f"{MEDIANS} Milliseconds; n and k are the rank's own."
    parts: list[Part] = []
    for op, title in OPERATORS.items():
        calls = [row for row in summary["rows"] if row["op"] == op]
        if not calls:
            continue
        points = {
            name: (colour, symbol, [_efficiency(row, key) for row in calls])
            for key, (name, colour, symbol) in METHODS.items()
        }
        names = [label(_call(row)).replace("\n", "<br>") for row in calls]
        cells = [
            (
                _call(row).replace("\n", " "),
                f" {CROSS} ".join(str(row[name]) for name in "mnk"),
                *(shown(row.get(key), "{:.3f}".format) for key in TIMES),
                shown(_efficiency(row, "tuned_ms"), percent),
            )
            for row in calls
        ]
        parts.append(Part(f"e-{op}", f"{title}: overlap efficiency", *efficiencies(names, points)))
        parts.append(Part(f"ms-{op}", f"{title}: milliseconds", table=Table(cells, head), caption=caption))
    return parts


def _efficiency(row: Row, method: str) -> float | None:
    times = (row.get(name) for name in (method, "gemm_ms", "serial_ms"))
    return overlap_efficiency(*(time if finite(time) else None for time in times))


def _call(row: Row) -> str:
    which = f"{row.get('direction', '?')}, m {row['m']}{_fp8(row)}"
    return f"{row.get('model', '?')} {row.get('layer', '?')}\n{which}"


def _layers(summary: Mapping[str, Any]) -> list[Part]:
    """Show where the time of each variant goes, one figure and table per workload."""
    caption = f"{MEDIANS} Hidden: share of what no communication would save. {FUSED_WAITS}"
    head = ("variant", "ms per layer", "against te", "hidden", "exposed ms", "peak GB")
    parts: list[Part] = []
    for number, (title, group) in enumerate(groupby(summary["rows"], key=_workload), 1):
        rows, breakdowns, cells = list(group), {}, []
        for row in rows:
            # By the names that a training run's breakdown.json has for them.
            traced = {k.removesuffix("_ms"): ms for k, ms in (row.get("breakdown") or {}).items() if finite(ms)}
            breakdowns[label(row["arm"])] = traced
            cells.append(
                (
                    row["arm"],
                    f"{row['ms_per_layer']:.2f} ({row['ms_per_layer_low']:.2f}…{row['ms_per_layer_high']:.2f})",
                    shown(row.get("speedup_vs_te"), f"{{:.3f}}{CROSS}".format),
                    shown(row.get("hidden_share"), percent),
                    shown(traced.get("communication_exposed"), "{:.2f}".format),
                    shown(row.get("peak_memory_gb"), "{:.1f}".format),
                )
            )
        figure = time_parts(breakdowns, "layer")
        about = f"One traced step of rank 0. {FUSED_WAITS}" if figure else "No step was traced."
        parts.append(Part(f"time-{number}", f"{title}: where the time goes", figure, about))
        title = f"{title}, {max(rows[0].get('layers') or 1, 1)} layers"
        parts.append(Part(f"layers-{number}", title, table=Table(cells, head), caption=caption))
    return parts


def _workload(row: Row) -> str:
    how = "" if row.get("sequence_parallel", True) else ", no sequence parallelism"
    how += ", frozen" if row.get("frozen") else ""
    return f"{row['model']}, {row['seq']} {CROSS} {row['micro_batch']}{_fp8(row)}{how}"


def _fp8(row: Row) -> str:
    return f", FP8 {row['fp8']}" if row.get("fp8") else ""


def _inference(summary: Mapping[str, Any]) -> list[Part]:
    """Show a figure and a table per kind; on CPUs (``note``) nothing is compared: tables alone."""
    note = summary.get("note")
    caption = f"{note}. {MEDIANS}" if note else f"{MEDIANS} Against the fastest stock form."
    head = ("case", "variant", "ms", *(() if note else ("against stock",)))
    parts: list[Part] = []
    for kind, group in groupby(summary["rows"], key=lambda row: row["kind"]):
        rows = list(group)
        if not note and (figure := _speedups(rows)):
            parts.append(Part(f"speed-up-{kind}", f"{kind}: against stock", figure, caption))
        cells = [
            (
                _case(row),
                row["arm"],
                f"{row['ms']:.4f} ({row['ms_low']:.4f}…{row['ms_high']:.4f})",
                *(() if note else (shown(row.get("speedup_vs_stock"), f"{{:.3f}}{CROSS}".format),)),
            )
            for row in rows
        ]
        parts.append(Part(f"ms-{kind}", f"{kind}: milliseconds", table=Table(cells, head), caption=caption))
    return parts


def _case(row: Row) -> str:
    what = f"{row['layers']} layer(s), " if "layers" in row else f"{row['layer']}, " if "layer" in row else ""
    return f"{row['model']}, {what}m {row['m']}"


def _speedups(rows: Sequence[Row]) -> Figure | None:
    cases = list(dict.fromkeys(map(_case, rows)))
    methods = {}
    for variant in dict.fromkeys(row["arm"] for row in rows):
        by_case = {_case(row): row.get("speedup_vs_stock") for row in rows if row["arm"] == variant}
        colour, symbol = LOOKS.get(variant, ("other", "circle-open"))
        methods[label(variant)] = (colour, symbol, [by_case.get(case) for case in cases])
    return points_by_row(list(map(label, cases)), methods, "times as fast as stock", (1,), CROSS)
