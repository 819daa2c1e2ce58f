"""A ``bench ops`` summary as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rich.text import Text

from megatron_flux.bench.plot import efficiency
from megatron_flux.bench.terminal import milliseconds, percent, print_table
from megatron_flux.metrics.table import connections, multicast

LEFT = ("op", "model", "layer", "direction")
ALONE = {"gemm_ms": "gemm", "nccl_ms": "nccl"}
COMPARED = {
    "serial_ms": "serial",
    "async_tp_ms": "async-TP",
    "pipelined_ms": "pipelined",
    "fused_ms": "fused",
    "tuned_ms": "tuned",
}
EFFICIENCIES = {"async_tp_ms": "E async-TP", "fused_ms": "E fused", "tuned_ms": "E tuned"}
SHORT = {"all_gather_gemm": "AG", "gemm_reduce_scatter": "RS"}


def show(summary: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the summary; the fastest of the methods that do the whole work is bold.

    Args:
        summary: what :func:`megatron_flux.bench.ops.run` returns or ``summary.json`` holds.
        file: where to; standard output by default.
    """
    print_table(
        LEFT,
        ("m x n x k", *ALONE.values(), *COMPARED.values(), *EFFICIENCIES.values()),
        [_cells(row) for row in summary["rows"]],
        last="choice",
        title=f"{summary['tp']} x {summary['device']}, {summary['link']}, tp = {summary['tp']}, "
        f"{len(summary['rows'])} call(s)",
        notes=(
            "milliseconds: median over rounds of the slowest rank; n and k are the rank's own",
            conditions(summary),
            "AG: all_gather_gemm, RS: gemm_reduce_scatter; E = 1 - (t - gemm) / (serial - gemm)",
        ),
        file=file,
    )


def conditions(summary: Mapping[str, Any]) -> str:
    """What stock and async-TP were allowed to use."""
    environment = summary.get("environment")
    said = multicast(environment)
    if queues := connections(environment):
        said += f"; {queues} for every method"
    return said


def show_async_tp(summary: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print what torch's async-TP took in processes of its own, beside the main pass.

    Args:
        summary: as :func:`megatron_flux.bench.async_tp.joined` makes it.
        file: where to; standard output by default.
    """
    here, there = (
        (summary.get("environment") or {}).get("CUDA_DEVICE_MAX_CONNECTIONS"),
        summary["async_tp_connections"],
    )
    names = ("gemm", "serial", "async-TP", "E async-TP")
    print_table(
        LEFT,
        ("m x n x k", *(f"{name}, {queues}" for queues in (here, there) for name in names)),
        [_async_tp(row, row["async_tp_own"]) for row in summary["rows"] if row["async_tp_own"]],
        title=f"async-TP, CUDA_DEVICE_MAX_CONNECTIONS {here} (with all methods) and {there} (by itself, afterwards)",
        notes=("E by the GEMM and the serial time of the same pass; the passes are not interleaved",),
        file=file,
    )


def _async_tp(row: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    cells = [SHORT[row["op"]], row["model"], row["layer"], row["direction"], f"{row['m']} x {row['n']} x {row['k']}"]
    for one in (row, own):
        cells += [milliseconds(one[name]) for name in ("gemm_ms", "serial_ms", "async_tp_ms")]
        cells.append(percent(efficiency(dict(one), "async_tp_ms")))
    return cells


def _cells(row: Mapping[str, Any]) -> list[str | Text]:
    fastest = min(row[name] for name in COMPARED if row[name] is not None)
    return [
        SHORT[row["op"]],
        row["model"],
        row["layer"],
        row["direction"],
        f"{row['m']} x {row['n']} x {row['k']}",
        *(milliseconds(row[name]) for name in ALONE),
        *(Text(milliseconds(row[name]), style="bold" if row[name] == fastest else "") for name in COMPARED),
        *(percent(efficiency(row, name)) for name in EFFICIENCIES),
        Text(row["tuned_choice"]),
    ]
