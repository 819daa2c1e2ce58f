"""The chapters of ``bench ops`` and ``bench layer`` folders: a figure and a table per group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_flux.metrics.report.figures import EFFICIENCY, Drawn, Points, label, points_by_row, time_parts
from megatron_flux.metrics.report.page import Chapter, Part, Table, settings_parts
from megatron_flux.metrics.report.run import Kind, Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import overlap_efficiency
from megatron_flux.metrics.table import CROSS, connections, finite, link, multicast, percent, shown

Row = Mapping[str, Any]
Columns = dict[str, Callable[[Row], str]]

METHODS = {"async_tp_ms": "torch async-TP", "fused_ms": "fused", "tuned_ms": "tuned"}
LOOKS = {  # colour and marker; any other variant has those of the last
    "tuned": ("flux", "diamond"),
    "fused": ("baseline", "square-open"),
    "": ("other", "circle-open"),
}
MEDIANS = "Median over rounds of the slowest rank (quartiles), all variants interleaved in one run."


def chapter(run: Run, id_: str) -> Chapter:
    """Return the chapter of a benchmark: its parts, then damage and settings; the conditions as subtitle."""
    summary, rows = run.summary, run.summary["rows"]
    environment = summary.get("environment")
    environment = environment if isinstance(environment, Mapping) else None
    group, columns, draw, caption = _KINDS[run.kind]
    parts: list[Part] = []
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(row)
    for number, (title, of) in enumerate(groups.items(), 1):
        figure, about = draw(of)
        if figure is not None:
            parts.append(Part(f"figure-{number}", title, figure, about))
        table = Table([[form(row) for form in columns.values()] for row in of], list(columns))
        parts.append(Part(f"table-{number}", f"{title}: times", table=table, caption=caption))
    if not rows:
        parts.append(Part("empty", "Rows", caption="Nothing has been measured."))
    skipped = [one for one in summary.get("skipped") or [] if isinstance(one, Mapping) and "reason" in one]
    if skipped:
        names = ("mode", "model", "seq", "micro_batch", "arm")
        pairs = [(" ".join(str(one[n]) for n in names if n in one), str(one["reason"])) for one in skipped]
        parts.append(Part("skipped", "Not measured", table=Table(list(dict.fromkeys(pairs)))))
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


def _number(name: str, form: str = "{:.3f}") -> Callable[[Row], str]:
    return lambda row: shown(row.get(name), form.format)


def _quartiles(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: form.format(row[name], row[f"{name}_low"], row[f"{name}_high"])


def _efficiency(row: Row, method: str) -> float | None:
    times = (row.get(name) for name in (method, "gemm_ms", "serial_ms"))
    return overlap_efficiency(*(time if finite(time) else None for time in times))


def _call(row: Row) -> str:
    fp8 = f", FP8 {row['fp8']}" if row.get("fp8") else ""
    return f"{row.get('model', '?')} {row.get('layer', '?')} {row.get('direction', '?')}, m {row['m']}{fp8}"


def _workload(row: Row) -> str:
    how = f", FP8 {row['fp8']}" if row.get("fp8") else ""
    how += "" if row.get("mode", "training") == "training" else f", {row['mode']}"
    how += "" if row.get("sequence_parallel", True) else ", no sequence parallelism"
    return f"{row['model']}, {row['seq']} {CROSS} {row['micro_batch']}{how}{', frozen' if row.get('frozen') else ''}"


def _parts(row: Row) -> dict[str, float]:
    """Return where a layer's time goes, by the names of a training run's breakdown.json."""
    return {k.removesuffix("_ms"): ms for k, ms in (row.get("breakdown") or {}).items() if finite(ms)}


def _points(values: Mapping[str, Sequence[float | None]]) -> Points:
    return {label(name): (*LOOKS.get(name, LOOKS[""]), of) for name, of in values.items()}


def _efficiencies(rows: Sequence[Row]) -> Drawn:
    values = {name: [_efficiency(row, key) for row in rows] for key, name in METHODS.items()}
    percents = {name: [None if one is None else 100 * one for one in of] for name, of in values.items()}
    names = [label(_call(row)).replace(", ", "<br>") for row in rows]
    figure = points_by_row(names, _points(percents), "overlap efficiency (%)", (0, 100))
    return figure, EFFICIENCY


def _layer_times(rows: Sequence[Row]) -> Drawn:
    figure = time_parts({label(row["arm"]): _parts(row) for row in rows}, "layer")
    return figure, f"One traced step of rank 0. {FUSED_WAITS}"


_TIMES = ("gemm_ms", "serial_ms", "async_tp_ms", "fused_ms", "tuned_ms")
_KINDS: dict[Kind, tuple[Callable[[Row], str], Columns, Callable[[Sequence[Row]], Drawn], str]] = {
    "operators": (
        lambda row: row["op"],
        {"call": _call, f"m {CROSS} n {CROSS} k": lambda row: f" {CROSS} ".join(str(row[name]) for name in "mnk")}
        | {name.removesuffix("_ms"): _number(name) for name in _TIMES}
        | {"E tuned": lambda row: shown(_efficiency(row, "tuned_ms"), percent)},
        _efficiencies,
        f"{MEDIANS} Milliseconds; n and k are the rank's own.",
    ),
    "layers": (
        _workload,
        {
            "variant": lambda row: row["arm"],
            "ms per layer": _quartiles("ms_per_layer", "{:.2f} ({:.2f}…{:.2f})"),
            "against te": _number("speedup_vs_te", f"{{:.3f}}{CROSS}"),
            "hidden": lambda row: shown(row.get("hidden_share"), percent),
            "exposed ms": lambda row: shown(_parts(row).get("communication_exposed"), "{:.2f}".format),
            "peak GB": _number("peak_memory_gb", "{:.1f}"),
        },
        _layer_times,
        f"{MEDIANS} Hidden: share of what no communication would save. {FUSED_WAITS}",
    ),
}
"""By kind: the group of a row, the columns of the table, the figure of a group, the caption of the table."""
