"""Show a comparison as text: number formats, the rows that terminal and page share, and the table printer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.summary import finite, verdict

UNKNOWN = "—"
MINUS = "\u2212"
CROSS = "\u00d7"

Form = Callable[[Any], str]


def shown(value: Any, form: Form) -> str:
    """Format ``value``; a dash if it is unknown or no number, a name if it is not finite."""
    try:
        known = float(value)  # of the strings that stand for what is not finite, too
    except (TypeError, ValueError):
        return UNKNOWN
    return form(known) if math.isfinite(known) else strict_json.encodable(known)


def number(value: float | None, form: str = ".3f", unit: str = "") -> str:
    """Format a benchmark's value, by default milliseconds; ``-`` if there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def short(value: float) -> str:
    """Format with three significant digits or more, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def memory(value: float) -> str:
    """Format bytes as GiB, or MiB below one GiB."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def percent(value: float, digits: int = 0) -> str:
    """Format a fraction as per cent."""
    return f"{100 * value:.{digits}f} %".replace("-", MINUS)


def relative(value: Any) -> str:
    """Format a relative difference as 1.2e-07; exactly 0 as 0."""
    return shown(value, lambda known: "0" if known == 0 else f"{known:.1e}")


def percent_change(baseline: Any, flux: Any) -> str:
    """Format flux against the baseline in per cent with a sign; empty if either is unknown or not finite."""
    if not finite(baseline) or not finite(flux) or baseline == 0:
        return ""
    text = f"{100 * (flux - baseline) / abs(baseline):+.1f} %"
    return "0.0 %" if text in ("+0.0 %", "-0.0 %") else text.replace("-", MINUS)


def counted(count: int, noun: str = "iteration") -> str:
    """Return ``3 iterations``, ``1 iteration``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def multicast(environment: Mapping[str, Any] | None, *, userbuffers: bool = False) -> str:
    """Describe whether NCCL, and TransformerEngine's ``userbuffers`` if they ran, could use NVLink multicast.

    ``environment`` holds variables by name, null if one was not set; None if it was not recorded.
    """
    if environment is None:
        return "NVLink multicast: not recorded"
    nccl = environment.get("NCCL_NVLS_ENABLE")
    set_to = "not set" if nccl is None else str(nccl)
    text = f"NVLink multicast {'off' if nccl == '0' else 'left to NCCL'} (NCCL_NVLS_ENABLE {set_to})"
    if userbuffers and environment.get("UB_SKIPMC") == "1":
        text += ", TE's userbuffers without it too (UB_SKIPMC 1)"
    return text


def connections(environment: Mapping[str, Any] | None) -> str:
    """Name the number of hardware queues; empty if it was not recorded."""
    value = (environment or {}).get("CUDA_DEVICE_MAX_CONNECTIONS")
    return "" if value is None else f"CUDA_DEVICE_MAX_CONNECTIONS {value}"


def link(summary: Mapping[str, Any]) -> str:
    """Name the link of a benchmark's ranks, and the wire format where it is not exact."""
    wire = summary.get("wire") or "exact"
    gradients = summary.get("grad_wire") or wire
    sent = "" if wire == gradients == "exact" else f", {wire} wire"
    return f"{summary.get('link', '?')}{sent}{'' if gradients == wire else f', {gradients} for gradients'}"


HEAD = ("", "baseline", "flux", "difference")
"""Cells of a row. The difference is flux against the baseline in per cent, empty where that says nothing."""

# A loss differs in its last digits or not at all: per cent would always say 0.
_ROWS: tuple[tuple[str, str, Form, bool], ...] = (
    ("tokens/s", "tokens_per_second", short, True),
    ("TFLOP/s per GPU", "tflops_per_gpu", short, True),
    ("MFU", "mfu", lambda value: percent(value, 1), False),
    ("peak memory", "peak_memory_bytes", memory, True),
    ("peak memory, allocated", "allocated_peak_bytes", memory, False),
    ("peak memory, workspace", "workspace_bytes", memory, False),
    ("gathered inputs kept for wgrad", "kept_bytes", memory, False),
    ("inputs kept per step", "inputs_kept", "{:,.0f}".format, False),
    ("inputs gathered again per step, no room", "inputs_gathered_again", "{:,.0f}".format, False),
    ("peak host memory of a rank", "host_memory_bytes", memory, False),
    ("loss, first step", "first_loss", "{:.6f}".format, False),
    ("loss, last step", "final_loss", "{:.6f}".format, False),
)
"""Label, key in the summary, format, whether the difference is shown. A row that neither variant has is left out."""


def rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table; without GPUs no difference is shown: it would be one of speed."""
    variants = baseline, flux = summary["arms"]["baseline"], summary["arms"]["flux"]
    times = [variant["step_time_ms"] for variant in variants]
    medians = [time["median"] for time in times]
    spreads = [f"{shown(t['p10'], short)}…{shown(t['p90'], short)}" if t["n"] else UNKNOWN for t in times]
    change_of = (lambda *_: "") if summary.get("without_gpu") else percent_change
    return [
        ("step time, median (ms)", *(shown(ms, short) for ms in medians), change_of(*medians)),
        ("step time, p10…p90 (ms)", *spreads, ""),
        ("timed steps", *(str(time["n"]) for time in times), ""),
        *(
            (
                label,
                *(shown(variant[key], form) for variant in variants),
                change_of(baseline[key], flux[key]) if change else "",
            )
            for label, key, form, change in _ROWS
            if any(variant[key] is not None for variant in variants)
        ),
    ]


def findings(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return ``(label, text)`` of what is shown below the table."""
    fallbacks = [f"{counted(calls, 'call')}: {reason}" for reason, calls in summary["flux_fallbacks"].items()]
    layers, device, environment = (summary.get(name) for name in ("flux_active_layers", "device", "environment"))
    loss = relative(summary["max_relative_loss_difference"])
    allowed = ", ".join(filter(None, (multicast(environment), connections(environment))))
    without = summary.get("without_gpu")
    on_gpus = isinstance(device, Mapping) and device.get("kind") == "cuda"
    return [
        ("largest relative loss difference", f"{loss} over {summary['compared_iterations']} iterations"),
        ("largest relative grad norm difference", relative(summary["max_relative_grad_norm_difference"])),
        ("active flux layers", UNKNOWN if layers is None else f"{layers} ({without})" if without else str(layers)),
        *([("both variants", allowed)] if on_gpus else []),
        *(("fallback to stock", line) for line in fallbacks or ([] if "reference" in (without or "") else ["none"])),
        *(("note", note) for note in summary["notes"]),
    ]


def print_summary(summary: Mapping[str, Any]) -> None:
    """Print table, findings and verdict of :func:`megatron_flux.metrics.summary.summarize` to standard output."""
    notes = [Text(f"{label}: {text}", "yellow" if label == "note" else "") for label, text in findings(summary)]
    print_table("", HEAD, rows(summary), *notes, Text(verdict(summary), "bold"))


def grid(head: Sequence[str], rows: Iterable[Iterable[str | Text]]) -> Table:
    """Return a table whose rows are never folded; the first column, and those headed ``<``, are aligned left."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, name in enumerate(head):
        left = not index or name.startswith("<")
        table.add_column(name.removeprefix("<"), no_wrap=True, justify="left" if left else "right")
    for row in rows:
        # Text, never a str: reasons come from elsewhere and may hold what rich takes for markup.
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def print_table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *notes: str | Text,
    file: IO[str] | None = None,
) -> None:
    """Print a :func:`grid` below ``title`` and above ``notes``, never cut or folded, so that notes can be searched.

    Where the encoding lacks a character there is a ``?``.
    """
    # A table takes its own width.
    console = Console(file=file, highlight=False, emoji=False, markup=False, width=10_000)

    def encodable(cell: str | Text) -> Text:
        plain, style = (cell.plain, cell.style) if isinstance(cell, Text) else (cell, "")
        return Text(plain.encode(console.encoding, "replace").decode(console.encoding), style)

    if title:
        console.print(encodable(title), style="bold", soft_wrap=True)
    console.print(grid(head, [map(encodable, row) for row in rows]))
    for note in notes:
        console.print(encodable(note), soft_wrap=True)
