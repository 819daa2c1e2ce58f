"""Tables of ``bench ops``, ``tune``, ``bench peers`` and ``bench layer``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from megatron_flux.bench.cases import Workload
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import overlap_efficiency
from megatron_flux.metrics.table import connections, link, multicast, number, print_table
from megatron_flux.ops.tuner.cache import Entry

Row = Mapping[str, Any]

NAMES = ("gemm", "nccl", "serial", "fused", "chunked", "chunked_int8", "tuned")
"""Variants of ``bench ops``. A run has chunked ones or the one that needs peer access."""
SHORT = {"all_gather_gemm": "AG", "gemm_reduce_scatter": "RS", "gemm_all_reduce": "AR"}


def efficiency(row: Row, variant: str) -> float | None:
    """Return FLUX's overlap efficiency: 1 is GEMM alone, 0 is serial; None where serial hides nothing."""
    return overlap_efficiency(row.get(f"{variant}_ms"), row["gemm_ms"], row["serial_ms"])


def _title(summary: Row, calls: int) -> str:
    tp = summary["tp"]
    return f"{tp} x {summary['device']}, {link(summary)}, tp = {tp}, {calls} call(s)"


def direction(row: Row) -> str:
    """Name the direction, and the FP8 recipe if there is one."""
    recipe = row.get("fp8")
    return f"{row['direction']}{'' if recipe is None else f', FP8 {recipe}'}"


def line(row: Row) -> str:
    """Return one call of ``bench ops`` as a line."""
    times = " ".join(f"{name} {number(row[f'{name}_ms'])}" for name in NAMES if f"{name}_ms" in row)
    return (
        f"{row['op'][:3]} {row['model']:<10} {row['layer']:<4} {direction(row):<7} m={row['m']:<5} n={row['n']:<5} "
        f"k={row['k']:<5} {times} E {number(row['e_overlap'], '.0%')} bound {row['bound_ms']:.3f} "
        f"[{row['tuned_choice']}]"
    )


def show_ops(summary: Row) -> None:
    """Print a summary of ``bench ops``; the fastest of the variants that do the whole work is bold."""
    rows = summary["rows"]
    names = [name for name in NAMES if any(f"{name}_ms" in row for row in rows)]
    whole = [name for name in names if name not in ("gemm", "nccl")]

    def cells(row: Row) -> list[str | Text]:
        times = {name: row.get(f"{name}_ms") for name in names}
        fastest = min(ms for name in whole if (ms := times[name]) is not None)
        return [
            *(SHORT[row["op"]], row["model"], row["layer"], direction(row), f"{row['m']} x {row['n']} x {row['k']}"),
            *(Text(number(ms), "bold" if name in whole and ms == fastest else "") for name, ms in times.items()),
            *(number(efficiency(row, name), ".0%") for name in whole if name != "serial"),
            row["tuned_choice"],
        ]

    queues = connections(summary.get("environment"))
    heads = (*names, *(f"E {name}" for name in whole if name != "serial"))
    print_table(
        _title(summary, len(rows)),
        ("<op", "<model", "<layer", "<direction", "m x n x k", *heads, "<plan"),
        map(cells, rows),
        "milliseconds: median over rounds of the slowest rank; n and k are the rank's own",
        multicast(summary.get("environment")) + (f"; {queues} for every variant" if queues else ""),
        "AG: all_gather_gemm, RS: gemm_reduce_scatter, AR: gemm_all_reduce; E = 1 - (t - gemm) / (serial - gemm)",
    )


def _first(times: Mapping[str, float | None]) -> tuple[str, float | None]:
    """Return the fastest arm, and the best other arm's time over flux's; None without either."""
    known = {arm: ms for arm, ms in times.items() if ms}
    others = [ms for arm, ms in known.items() if arm != "flux"]
    first = min(known, key=known.__getitem__, default="-")
    return first, min(others) / known["flux"] if others and "flux" in known else None


def peers_line(call: Row, rows: Sequence[Row]) -> str:
    """Return one call of ``bench peers`` as a line."""
    times = {row["arm"]: row["ms"] for row in rows}
    shown = " ".join(f"{arm} {number(ms)}" for arm, ms in times.items())
    return f"{' '.join(f'{name}={value}' for name, value in call.items())}: {shown} [{_first(times)[0]}]"


def show_peers(summary: Row) -> None:
    """Print a summary of ``bench peers``: every arm's time, the fastest bold; then who did not run, and why."""
    rows = summary["rows"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    calls: dict[tuple[str, ...], dict[str, float | None]] = {}
    for row in rows:
        call = (SHORT[row["op"]], row["model"], row["dtype"], str(row["m"]), f"{row['n']} x {row['k']}")
        calls.setdefault(call, {})[row["arm"]] = row["ms"]

    def cells(call: tuple[str, ...]) -> list[str | Text]:
        times = calls[call]
        first, gain = _first(times)
        shown = [
            Text("WRONG" if arm in times and times[arm] is None else number(times.get(arm)), "bold" * (arm == first))
            for arm in arms
        ]
        return [*call, *shown, first, number(gain, ".2f", "x")]

    queues = connections(summary.get("environment"))
    reasons = Counter((one["arm"], one["reason"]) for one in summary["skipped"])
    print_table(
        _title(summary, len(calls)),
        ("<op", "<model", "<dtype", "m", "n x k", *arms, "<first", "flux vs best other"),
        map(cells, calls),
        f"milliseconds: median over rounds of the slowest rank; {multicast(summary.get('environment'))}; {queues}",
        *(f"{arm} did not run {count} call(s): {reason}" for (arm, reason), count in reasons.items()),
    )


def show_plans(plans: Sequence[tuple[str, str, Entry]]) -> None:
    """Print plans: of each the name of the call, its key in the tuner's cache, and the entry."""
    by_machine: dict[str, list[list[str | Text]]] = {}
    for name, key, entry in plans:
        call, _, machine = key.partition(" | ")
        fused = min((ms for way, ms in entry.ms.items() if way.startswith("fused")), default=None)
        before, after = entry.ms.get("reference"), entry.ms.get(entry.label)
        gain = number(before / after if before and after else None, ".2f", "x")
        label = Text(entry.label, style="" if entry.label == "reference" else "bold")
        times = map(number, (before, fused, after))
        by_machine.setdefault(machine, []).append([name, call, *times, gain, label])
    for machine, rows in by_machine.items():
        print_table(
            f"{machine}: {len(rows)} call(s)",
            ("<layer", "<call", "reference", "best fused", "plan", "gain", "<planned"),
            rows,
            "milliseconds: median when it was tuned; gain: reference / plan",
        )


LAYER_HEAD = ("<variant", "ms per layer", "vs te", "hidden", "exposed", "idle", "host ms", "MHz", "peak GB", "agrees")
EXPLANATION = (
    "ms per layer: median (quartiles), slowest rank. vs te: [95 % interval]. hidden: share of what no communication "
    "saves over te. exposed, idle: ms per layer of communication beside which nothing ran, and of nothing at all "
    f"(rank 0). {FUSED_WAITS} host ms: to enqueue one step. MHz: the slowest GPU's clock in the middle of a burst."
)


def _layer_cells(row: Row) -> tuple[str, ...]:
    parts, agreement, interval = row["breakdown"], row["agreement"], row.get("speedup_vs_te_ci95")
    graph = " (graph)" if row.get("cuda_graph") else ""
    return (
        f"{row['arm']}{graph}{'' if row['training'] else ', a bound'}",
        f"{row['ms_per_layer']:.3f} ({row['ms_per_layer_low']:.3f}-{row['ms_per_layer_high']:.3f})",
        number(row["speedup_vs_te"], ".3f", "x") + (f" [{interval[0]:.3f}-{interval[1]:.3f}]" if interval else ""),
        number(row["hidden_share"], ".0%"),
        number(parts.get("communication_exposed_ms")),
        number(parts.get("idle_ms")),
        f"{row['host_ms_per_step']:.2f}",
        number(row.get("sm_clock_mhz"), ".0f"),
        number(row["peak_memory_gb"], ".2f"),
        "-" if agreement is None else "NO" if not agreement["ok"] else "y alone" if "left_out" in agreement else "yes",
    )


def show_layers(summary: Row) -> None:
    """Print one table per workload, what was skipped and why."""
    userbuffers = any(row["arm"] == "te_ub" for row in summary["rows"])
    conditions = multicast(summary.get("environment"), userbuffers=userbuffers)
    print(f"{summary['device']}, tp {summary['tp']}, {link(summary)}, {conditions}")
    for title, group in groupby(summary["rows"], key=workload_title):
        rows = list(group)
        stock = [
            f"{row['arm']}: {calls} calls ran stock: {reason}"
            for row in rows
            for reason, calls in row.get("flux_fallbacks", {}).items()
        ]
        print_table(title, LAYER_HEAD, map(_layer_cells, rows), *stock)
    for skipped in summary["skipped"]:
        print(f"{workload_title(skipped)}: {skipped['arm']} skipped: {skipped['reason']}")
    print(EXPLANATION)


def workload_title(row: Row) -> str:
    """Return the name that the workload has in logs and file names, and its number of layers."""
    workload = Workload.model_validate({name: row[name] for name in Workload.model_fields if name in row})
    return f"{workload.label}, {workload.layers} layers"
