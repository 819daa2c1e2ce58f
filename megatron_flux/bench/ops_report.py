"""What people see of ``bench ops`` and ``tune``: a line per call, tables, and overlap efficiencies as SVG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megatron_flux.errors import UserError
from megatron_flux.metrics.numbers import milliseconds, number, percent
from megatron_flux.metrics.statistics import overlap_efficiency
from megatron_flux.metrics.table import connections, multicast
from megatron_flux.ops.kernel_config import label_of

Row = Mapping[str, Any]

WHOLE = {"serial": "serial", "async_tp": "async-TP", "pipelined": "pipelined", "fused": "fused", "tuned": "tuned"}
"""Variants that do the whole work, by the names people see."""
NAMES = {"gemm": "gemm", "nccl": "nccl", **WHOLE}
COLOURS = {"async_tp": "#9aa0a6", "fused": "#4c8bf5", "tuned": "#188038"}
"""Variants of which the overlap efficiency is shown."""
SHORT = {"all_gather_gemm": "AG", "gemm_reduce_scatter": "RS"}
CALL = ("<op", "<model", "<layer", "<direction", "m x n x k")

STEP, BAR, LEFT, WIDTH, TOP = 40, 10, 300, 560, 50
LOW, HIGH = -1.0, 1.2


def efficiency(row: Row, variant: str) -> float | None:
    """FLUX's overlap efficiency of ``variant``: 1 is GEMM alone, 0 is serial; None where serial hides nothing."""
    return overlap_efficiency(row.get(f"{variant}_ms"), row["gemm_ms"], row["serial_ms"])


def line(row: Row) -> str:
    """One call in one line."""
    times = " ".join(f"{shown} {milliseconds(row[f'{name}_ms'])}" for name, shown in NAMES.items())
    return (
        f"{row['op'][:3]} {row['model']:<10} {row['layer']:<4} {row['direction']:<7} m={row['m']:<5} n={row['n']:<5} "
        f"k={row['k']:<5} {times} E {percent(row['e_overlap'])} bound {row['bound_ms']:.3f} [{row['tuned_choice']}]"
    )


def show(summary: Row, file: IO[str] | None = None) -> None:
    """Print a summary of ``bench ops``; the fastest of the variants that do the whole work is bold."""

    def cells(row: Row) -> list[str | Text]:
        fastest = min(row[f"{name}_ms"] for name in WHOLE if row[f"{name}_ms"] is not None)
        times = {name: row[f"{name}_ms"] for name in NAMES}
        return [
            *_call(row),
            *(Text(milliseconds(ms), "bold" if name in WHOLE and ms == fastest else "") for name, ms in times.items()),
            *(percent(efficiency(row, name)) for name in COLOURS),
            row["tuned_choice"],
        ]

    tp, rows = summary["tp"], summary["rows"]
    queues = connections(summary.get("environment"))
    print_table(
        f"{tp} x {summary['device']}, {summary['link']}, tp = {tp}, {len(rows)} call(s)",
        (*CALL, *NAMES.values(), *(f"E {NAMES[name]}" for name in COLOURS), "<choice"),
        map(cells, rows),
        "milliseconds: median over rounds of the slowest rank; n and k are the rank's own",
        multicast(summary.get("environment")) + (f"; {queues} for every method" if queues else ""),
        "AG: all_gather_gemm, RS: gemm_reduce_scatter; E = 1 - (t - gemm) / (serial - gemm)",
        file=file,
    )


def show_async_tp(summary: Row) -> None:
    """Print what torch's async-TP took in processes of its own (``async_tp_own``), beside the main pass."""
    here = (summary.get("environment") or {}).get("CUDA_DEVICE_MAX_CONNECTIONS")
    there = summary["async_tp_connections"]
    columns = ("gemm", "serial", "async-TP", "E async-TP")

    def cells(row: Row) -> list[str]:
        found = _call(row)
        for one in (row, row["async_tp_own"]):
            found += [milliseconds(one[name]) for name in ("gemm_ms", "serial_ms", "async_tp_ms")]
            found.append(percent(efficiency(one, "async_tp")))
        return found

    print_table(
        f"async-TP, CUDA_DEVICE_MAX_CONNECTIONS {here} (with all methods) and {there} (by itself, afterwards)",
        (*CALL, *(f"{name}, {queues}" for queues in (here, there) for name in columns)),
        [cells(row) for row in summary["rows"] if row["async_tp_own"]],
        "E by the GEMM and the serial time of the same pass; the passes are not interleaved",
    )


def _call(row: Row) -> list[str]:
    return [SHORT[row["op"]], row["model"], row["layer"], row["direction"], f"{row['m']} x {row['n']} x {row['k']}"]


def print_table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *notes: str,
    file: IO[str] | None = None,
) -> None:
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


def svg(summary: Row) -> str:
    """Bars of overlap efficiency, a group per call; values beyond the axis are cut and written out."""

    def x(value: float) -> float:
        return LEFT + (min(max(value, LOW), HIGH) - LOW) / (HIGH - LOW) * WIDTH

    rows = summary["rows"]
    height = TOP + STEP * len(rows) + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="14">Overlap efficiency, {escape(summary["device"])}, tp = {summary["tp"]}'
        "</text>",
    ]
    shown = [name for name in COLOURS if any(row.get(f"{name}_ms") is not None for row in rows)]
    for i, name in enumerate(shown):
        out.append(f'<rect x="{LEFT + 110 * i}" y="26" width="10" height="10" fill="{COLOURS[name]}"/>')
        out.append(f'<text x="{LEFT + 110 * i + 15}" y="35">{NAMES[name]}</text>')
    for tick in (-1.0, -0.5, 0.0, 0.5, 1.0):
        out.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{height - 24}" stroke="#ddd"/>')
        out.append(f'<text x="{x(tick)}" y="{height - 10}" text-anchor="middle">{tick:.0%}</text>')
    for i, row in enumerate(rows):
        y = TOP + STEP * i
        label = f"{row['op'].split('_')[0]} {row['model']} {row['layer']} {row['direction']} m={row['m']}"
        out.append(f'<text x="8" y="{y + 20}">{escape(label)}</text>')
        for j, name in enumerate(shown):
            e, top, fill = efficiency(row, name), y + 3 + j * (BAR + 1), f'fill="{COLOURS[name]}"'
            if e is not None:
                a, b = sorted((x(0), x(e)))
                out.append(f'<rect x="{a:.1f}" y="{top}" width="{max(b - a, 1):.1f}" height="{BAR}" {fill}/>')
                out.append(f'<text x="{LEFT + WIDTH + 8}" y="{top + 9}" {fill}>{e:.0%}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


# Choices of the tuner.

_KEY = re.compile(r"(?P<op>\w+) m=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) (?P<setting>.+)")
"""The part of a key before the first bar; see :func:`megatron_flux.ops.backends.tuning_cache.describe`."""


def chosen(answer: Row) -> str:
    """What runs, named as the answer's times are: a backend, with ``fused`` its plan."""
    if answer["plan"] is None:
        return answer["backend"]
    try:
        return f"fused {label_of(answer['plan'])}"
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
        *map(milliseconds, (before, ms.get("pipelined"), fused, after)),
        number(before / after if before and after else None, ".2f", "x"),
        Text(name, style="" if name == "reference" else "bold"),
    ]


def _order(key: str) -> tuple[Any, ...]:
    call = _KEY.match(key)
    return (1, key) if call is None else (0, call["op"], call["setting"], *(int(call[size]) for size in "mnk"))
