"""What people see of ``bench ops``, ``tune`` and ``bench layer``: tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megatron_flux.bench.fp8 import of_title
from megatron_flux.errors import UserError
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import overlap_efficiency
from megatron_flux.metrics.table import connections, link, multicast, number
from megatron_flux.ops.backends import tuning_cache

Row = Mapping[str, Any]
Cells = Iterable[Sequence[str | Text]]


def print_table(title: str, head: Sequence[str], rows: Cells, *notes: str, file: IO[str] | None = None) -> None:
    """Print ``rows`` under ``title``, each on one line however narrow the terminal: no figure is cut or folded.

    A column whose name in ``head`` begins with ``<`` is aligned left, others right.
    """
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    unicode = console.encoding.lower().startswith("utf")
    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, padding=(0, 1, 0, 0), pad_edge=False)
    for name in head:
        table.add_column(name.removeprefix("<"), no_wrap=True, justify="left" if name.startswith("<") else "right")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, wide)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


# Operators.

WHOLE = {"serial": "serial", "async_tp": "async-TP", "pipelined": "pipelined", "fused": "fused", "tuned": "tuned"}
"""Variants that do the whole work, by the names people see."""
NAMES = {"gemm": "gemm", "nccl": "nccl", **WHOLE}
HOST = {"chunked": "chunked", "chunked_fp8": "chunked fp8", "chunked_int8": "chunked int8"}
"""Variants that do the whole work where the link is not NVLink."""
HOST_NAMES = {"gemm": "gemm", "nccl": "nccl", "serial": "serial", **HOST, "tuned": "tuned"}
OVERLAPPED = ("async_tp", "fused", *HOST, "tuned")
"""Variants of which the overlap efficiency is shown."""
SHORT = {"all_gather_gemm": "AG", "gemm_reduce_scatter": "RS"}
CALL = ("<op", "<model", "<layer", "<direction", "m x n x k")


def measured(rows: Sequence[Row]) -> dict[str, str]:
    """The variants that ``rows`` have been measured for, by the names people see."""
    known = HOST_NAMES if any(f"{name}_ms" in row for row in rows for name in HOST) else NAMES
    return {name: shown for name, shown in known.items() if not rows or any(f"{name}_ms" in row for row in rows)}


def efficiency(row: Row, variant: str) -> float | None:
    """FLUX's overlap efficiency of ``variant``: 1 is GEMM alone, 0 is serial; None where serial hides nothing."""
    return overlap_efficiency(row.get(f"{variant}_ms"), row["gemm_ms"], row["serial_ms"])


def line(row: Row) -> str:
    """One call in one line."""
    times = " ".join(f"{shown} {number(row[f'{name}_ms'])}" for name, shown in measured([row]).items())
    return (
        f"{row['op'][:3]} {row['model']:<10} {row['layer']:<4} {row['direction']:<7} m={row['m']:<5} n={row['n']:<5} "
        f"k={row['k']:<5}{of_title(row.get('fp8'))} {times} E {number(row['e_overlap'], '.0%')} "
        f"bound {row['bound_ms']:.3f} [{row['tuned_choice']}]"
    )


def show_ops(summary: Row, file: IO[str] | None = None) -> None:
    """Print a summary of ``bench ops``; the fastest of the variants that do the whole work is bold."""
    tp, rows = summary["tp"], summary["rows"]
    names = measured(rows)
    whole = [name for name in names if name not in ("gemm", "nccl")]
    overlapped = [name for name in OVERLAPPED if name in names]

    def cells(row: Row) -> list[str | Text]:
        times = {name: row.get(f"{name}_ms") for name in names}
        fastest = min(times[name] for name in whole if times[name] is not None)
        return [
            *_call(row),
            *(Text(number(ms), "bold" if name in whole and ms == fastest else "") for name, ms in times.items()),
            *(number(efficiency(row, name), ".0%") for name in overlapped),
            row["tuned_choice"],
        ]

    queues = connections(summary.get("environment"))
    print_table(
        f"{tp} x {summary['device']}, {link(summary)}, tp = {tp}, {len(rows)} call(s)",
        (*CALL, *names.values(), *(f"E {names[name]}" for name in overlapped), "<choice"),
        map(cells, rows),
        "milliseconds: median over rounds of the slowest rank; n and k are the rank's own",
        multicast(summary.get("environment")) + (f"; {queues} for every method" if queues else ""),
        "AG: all_gather_gemm, RS: gemm_reduce_scatter; E = 1 - (t - gemm) / (serial - gemm)",
        file=file,
    )


def show_async_tp(summary: Row, file: IO[str] | None = None) -> None:
    """Print what torch's async-TP took in processes of its own (``async_tp_own``), beside the main pass."""
    here = (summary.get("environment") or {}).get("CUDA_DEVICE_MAX_CONNECTIONS")
    there = summary["async_tp_connections"]
    columns = ("gemm", "serial", "async-TP", "E async-TP")

    def cells(row: Row) -> list[str]:
        found = _call(row)
        for one in (row, row["async_tp_own"]):
            found += [number(one[name]) for name in ("gemm_ms", "serial_ms", "async_tp_ms")]
            found.append(number(efficiency(one, "async_tp"), ".0%"))
        return found

    print_table(
        f"async-TP, CUDA_DEVICE_MAX_CONNECTIONS {here} (with all methods) and {there} (by itself, afterwards)",
        (*CALL, *(f"{name}, {queues}" for queues in (here, there) for name in columns)),
        (cells(row) for row in summary["rows"] if "async_tp_own" in row),
        "E by the GEMM and the serial time of the same pass; the passes are not interleaved",
        file=file,
    )


def _call(row: Row) -> list[str]:
    direction = f"{row['direction']}{of_title(row.get('fp8'))}"
    return [SHORT[row["op"]], row["model"], row["layer"], direction, f"{row['m']} x {row['n']} x {row['k']}"]


# Choices of the tuner.

_KEY = re.compile(r"(?P<op>\w+) m=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) (?P<setting>.+)")
"""The part of a key before the first bar; see :func:`megatron_flux.ops.backends.tuning_cache.describe`."""


def chosen(answer: Row) -> str:
    """What runs, named as the answer's times are."""
    try:
        return tuning_cache.label(answer)
    except TypeError:
        return "fused (a plan of another version)"


def show_choices(
    answers: Mapping[str, Row], file: IO[str] | None = None, calls: Sequence[tuple[str, str]] | None = None
) -> None:
    """Print ``answers`` of the tuner's cache, by key, in a table for each GPU and versions.

    ``calls`` are rows as pairs of a model's name for a call and its key; without it every key, sorted by shape.

    Raises:
        UserError: an answer that is not what the tuner writes.
    """
    tables: dict[str, list[list[str | Text]]] = {}
    for name, key in calls or [("", key) for key in sorted(answers, key=_order)]:
        machine = ", ".join(key.split(" | ")[1:]) or "unknown machine"
        tables.setdefault(machine, []).append([*([name] if calls else []), *_choice(key, answers[key])])
    for machine, rows in tables.items():
        print_table(
            f"{machine}: {len(rows)} call(s)",
            (*(["<call"] if calls else []), "<op", "<setting", "m x n x k", "reference", "pipelined", "best fused",
             "choice", "gain", "<chosen"),
            rows,
            "milliseconds: the slowest rank's median when it was tuned; gain: reference / choice",
            file=file,
        )  # fmt: skip


def _choice(key: str, answer: Row) -> list[str | Text]:
    try:
        ms, name = dict(answer["ms"]), chosen(answer)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"the tuning cache has no usable answer for {key!r}; delete that entry to tune it again"
        ) from None
    call = _KEY.match(key.split(" | ")[0])
    shape = (call["op"], call["setting"], f"{call['m']} x {call['n']} x {call['k']}") if call else (key, "-", "-")
    fused = min((value for way, value in ms.items() if way.startswith("fused")), default=None)
    before, after = ms.get("reference"), ms.get(name)
    return [
        *shape,
        *map(number, (before, ms.get("pipelined"), fused, after)),
        number(before / after if before and after else None, ".2f", "x"),
        Text(name, style="" if name == "reference" else "bold"),
    ]


def _order(key: str) -> tuple[Any, ...]:
    call = _KEY.match(key)
    return (1, key) if call is None else (0, call["op"], call["setting"], *(int(call[size]) for size in "mnk"))


# Layers.

LAYER_HEAD = ("<arm", "ms per layer", "vs te", "hidden", "exposed", "idle", "host ms", "MHz", "peak GB", "agrees")
EXPLANATION = (
    "ms per layer: median (quartiles), slowest rank. hidden: share of what the floor saves over te. exposed, idle: ms "
    "per layer of communication beside which nothing ran, and of nothing at all (rank 0). "
    f"{FUSED_WAITS} host ms: to enqueue one step. MHz: the slowest GPU's clock in the middle of a burst."
)


def _label(row: Row) -> str:
    graph = " (graph)" if row.get("cuda_graph") else ""
    return f"{row['arm']}{graph}{'' if row['training'] else ', no training'}"


def _layer_cells(row: Row) -> tuple[str, ...]:
    parts, agreement = row["breakdown"], row["agreement"]
    return (
        _label(row),
        f"{row['ms_per_layer']:.3f} ({row['ms_per_layer_low']:.3f}-{row['ms_per_layer_high']:.3f})",
        number(row["speedup_vs_te"], ".3f", "x"),
        number(row["hidden_share"], ".0%"),
        number(parts.get("communication_exposed_ms")),
        number(parts.get("idle_ms")),
        f"{row['host_ms_per_step']:.2f}",
        number(row.get("sm_clock_mhz"), ".0f"),  # absent from earlier runs
        number(row["peak_memory_gb"], ".2f"),
        "-" if agreement is None else "yes" if agreement["ok"] else "NO",
    )


def show_layers(summary: Row, file: IO[str] | None = None) -> None:
    """Print one table per workload, what was skipped and why."""
    print(f"{summary['device']}, tp {summary['tp']}, {link(summary)}, {_conditions(summary)}", file=file)
    for title, rows in _by_workload(summary):
        stock = [
            f"{row['arm']}: {calls} calls ran stock: {reason}"
            for row in rows
            for reason, calls in row.get("flux_fallbacks", {}).items()
        ]
        print_table(title, LAYER_HEAD, map(_layer_cells, rows), *stock, file=file)
    for skipped in summary["skipped"]:
        print(f"{_title(skipped)}: {skipped['arm']} skipped: {skipped['reason']}", file=file)
    print(EXPLANATION, file=file)


def _conditions(summary: Row) -> str:
    """What stock was allowed to use."""
    ran = any(row["arm"] == "te_ub" for row in summary["rows"])
    return multicast(summary.get("environment"), userbuffers=ran)


def _title(row: Row) -> str:
    how = "" if row.get("sequence_parallel", True) else ", no sequence parallelism"
    how += ", frozen" if row.get("frozen") else ""
    return f"{row['model']}, {row['seq']} x {row['micro_batch']}{of_title(row.get('fp8'))}{how}, {row['layers']} layers"


def _by_workload(summary: Row) -> list[tuple[str, list[Row]]]:
    return [(title, list(group)) for title, group in groupby(summary["rows"], key=_title)]
