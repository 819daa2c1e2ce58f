"""A ``bench ops`` summary for people: a line per call, tables, and a picture of overlap efficiencies as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megatron_flux.metrics.summary import overlap_efficiency
from megatron_flux.metrics.table import connections, multicast, number

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

COLOURS = {"async_tp_ms": "#9aa0a6", "fused_ms": "#4c8bf5", "tuned_ms": "#188038"}
ROW, BAR, LEFT_EDGE, WIDTH, TOP = 40, 10, 300, 560, 50
LOW, HIGH = -1.0, 1.2


def efficiency(row: Mapping[str, Any], variant: str) -> float | None:
    """FLUX's overlap efficiency of ``variant``: 1 is GEMM alone, 0 is serial; None where serial hides nothing."""
    return overlap_efficiency(row.get(variant), row["gemm_ms"], row["serial_ms"])


def line(row: Mapping[str, Any]) -> str:
    """One call in one line."""
    times = [f"{name} {number(row[key])}" for key, name in {**ALONE, **COMPARED}.items()]
    return (
        f"{row['op'][:3]} {row['model']:<10} {row['layer']:<4} {row['direction']:<7} m={row['m']:<5} n={row['n']:<5} "
        f"k={row['k']:<5} {' '.join(times)} E {number(row['e_overlap'], '.0%')} bound {row['bound_ms']:.3f} "
        f"[{row['tuned_choice']}]"
    )


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
    queues = connections(environment)
    return multicast(environment) + (f"; {queues} for every method" if queues else "")


def show_async_tp(summary: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print what torch's async-TP took in processes of its own, beside the main pass.

    Args:
        summary: as :func:`megatron_flux.bench.async_tp.joined` makes it.
        file: where to; standard output by default.
    """
    here = (summary.get("environment") or {}).get("CUDA_DEVICE_MAX_CONNECTIONS")
    there = summary["async_tp_connections"]
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
    cells = _call(row)
    for one in (row, own):
        cells += [number(one[name]) for name in ("gemm_ms", "serial_ms", "async_tp_ms")]
        cells.append(number(efficiency(one, "async_tp_ms"), ".0%"))
    return cells


def _cells(row: Mapping[str, Any]) -> list[str | Text]:
    fastest = min(row[name] for name in COMPARED if row[name] is not None)
    return [
        *_call(row),
        *(number(row[name]) for name in ALONE),
        *(Text(number(row[name]), style="bold" if row[name] == fastest else "") for name in COMPARED),
        *(number(efficiency(row, name), ".0%") for name in EFFICIENCIES),
        Text(row["tuned_choice"]),
    ]


def _call(row: Mapping[str, Any]) -> list[str]:
    return [SHORT[row["op"]], row["model"], row["layer"], row["direction"], f"{row['m']} x {row['n']} x {row['k']}"]


def print_table(
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str,
    notes: Sequence[str] = (),
    last: str = "",
    file: IO[str] | None = None,
) -> None:
    """Print ``rows`` under ``title``, each on one line however narrow the terminal: no figure is cut or folded.

    Args:
        left: names of the first columns, aligned left.
        right: names of the next columns, aligned right.
        rows: cells, as many as there are columns.
        title: the line above.
        notes: lines below.
        last: name of one more column, aligned left; none if empty.
        file: where to; standard output by default.
    """
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    unicode = console.encoding.lower().startswith("utf")
    table = Table(box=box.SIMPLE_HEAD if unicode else box.ASCII2, padding=(0, 1, 0, 0), pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    if last:
        table.add_column(last, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    wide = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    console.width = max(console.width, wide)
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def svg(summary: Mapping[str, Any]) -> str:
    """The drawing; values beyond the axis are cut and written out."""

    def x(value: float) -> float:
        return LEFT_EDGE + (min(max(value, LOW), HIGH) - LOW) / (HIGH - LOW) * WIDTH

    rows = summary["rows"]
    height = TOP + ROW * len(rows) + 30
    title = f"Overlap efficiency, {escape(summary['device'])}, tp = {summary['tp']}"
    size = f'width="{LEFT_EDGE + WIDTH + 90}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{title}</text>',
    ]
    shown = {key: colour for key, colour in COLOURS.items() if any(row.get(key) is not None for row in rows)}
    for i, (key, colour) in enumerate(shown.items()):
        out.append(f'<rect x="{LEFT_EDGE + 110 * i}" y="26" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{LEFT_EDGE + 110 * i + 15}" y="35">{COMPARED[key]}</text>')
    for tick in (-1.0, -0.5, 0.0, 0.5, 1.0):
        out.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{height - 24}" stroke="#ddd"/>')
        out.append(f'<text x="{x(tick)}" y="{height - 10}" text-anchor="middle">{tick:.0%}</text>')
    for i, row in enumerate(rows):
        y = TOP + ROW * i
        label = f"{row['op'].split('_')[0]} {row['model']} {row['layer']} {row['direction']} m={row['m']}"
        out.append(f'<text x="8" y="{y + 20}">{escape(label)}</text>')
        for j, (key, colour) in enumerate(shown.items()):
            e = efficiency(row, key)
            if e is None:
                continue
            a, b = sorted((x(0), x(e)))
            top = y + 3 + j * (BAR + 1)
            out.append(f'<rect x="{a:.1f}" y="{top}" width="{max(b - a, 1):.1f}" height="{BAR}" fill="{colour}"/>')
            out.append(f'<text x="{LEFT_EDGE + WIDTH + 8}" y="{top + 9}" fill="{colour}">{e:.0%}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"
