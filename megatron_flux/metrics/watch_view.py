"""What ``megatron-flux watch`` shows: plain words and a table that fits 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from megatron_flux.metrics.peak_memory import OWN_SINCE
from megatron_flux.metrics.rows import memory, milliseconds, rate
from megatron_flux.metrics.statistics import Record, median_of, timed
from megatron_flux.metrics.summary import ARMS
from megatron_flux.metrics.watch import RECENT, Watched

STALL_S, STALL_STEPS = 30.0, 10.0
"""No record for this long, and for this many usual steps: said."""


def view(watched: Watched, now: float) -> Group:
    """The table as it stands, with what else is to be said below it."""
    arms = watched.arms
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right", style="cyan" if arm == "baseline" else "yellow")
    for label, cell in _ROWS.items():
        cells = [cell(watched.tails[arm].records) for arm in arms]
        if any(cells):
            table.add_row(label, *(Text(text or "-") for text in cells))
    title = Text(f"{watched.path}{_about(watched)}")
    return Group(title, _progress(watched), table, *(Text(line, style=style) for line, style in _said(watched, now)))


def _about(watched: Watched) -> str:
    device = watched.config.get("device")
    device = device if isinstance(device, dict) else {}
    layout = watched.config.get("layout")
    words = [
        str(watched.settings.get("preset", "")),
        f"{device['count']} x {device['name']}" if len(device) > 1 else "",
    ]
    if isinstance(layout, dict):
        words.append(" ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp") if name in layout))
    return "".join(f", {word}" for word in words if word)


def _progress(watched: Watched) -> Text:
    steps = watched.steps
    parts = []
    for arm in watched.arms:
        last = watched.last_iteration(arm)
        parts.append(f"{arm} {last}" + (f" of {steps} ({100 * last / steps:.0f} %)" if steps else ""))
    remaining = watched.remaining_s()
    if watched.done:
        parts.append("all steps done")
    elif remaining is not None:
        parts.append(f"{duration(remaining)} left")
    return Text(", ".join(parts), style="bold")


def _said(watched: Watched, now: float) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    records = {arm: watched.tails[arm].records for arm in ARMS}
    pace = {arm: median_of(timed(records[arm]), "iteration-time") for arm in ARMS}
    if pace["baseline"] and pace["flux"]:
        interval = watched.speedup_interval()
        shown = f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ", too few blocks for an interval"
        lines.append((f"speed-up so far {pace['baseline'] / pace['flux']:.3f}{shown}", "bold"))
    flux = records["flux"]
    for reason, calls in (flux[-1]["flux/fallbacks"] if flux else {}).items():
        lines.append((f"{calls} calls left to stock: {reason}", "yellow"))
    silent = watched.silent_s(now)
    usual = max((value for value in pace.values() if value), default=0.0)
    if silent is not None and not watched.done:
        stalled = silent > max(STALL_S, STALL_STEPS * usual)
        lines.append(
            (f"last record {duration(silent)} ago" + (": stalled, or ended" if stalled else ""), "red" * stalled)
        )
    for arm in watched.arms:
        # The last line of a running job may be half written: only whole lines can be damaged.
        lines += [(f"{arm}/metrics.jsonl: {problem}", "red") for problem in watched.tails[arm].problems]
    return lines


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _last(name: str, form: Callable[[float], str]) -> Callable[[list[Record]], str]:
    """The field's last known value."""

    def cell(records: list[Record]) -> str:
        value = next((r[name] for r in reversed(records) if r.get(name) is not None), None)
        return "" if value is None else form(value) if math.isfinite(value) else str(value)

    return cell


def _step_time(records: list[Record]) -> str:
    if not records:
        return ""
    recent = median_of(records[-RECENT:], "iteration-time")
    last = 1000 * records[-1]["iteration-time"]
    return f"{milliseconds(last)} ({milliseconds(1000 * (recent or 0.0))})"


def _sampled(name: str, form: Callable[[Any], str]) -> Callable[[list[Record]], str]:
    """The object of the latest sample, an entry a line."""

    def cell(records: list[Record]) -> str:
        found = next((r[name] for r in reversed(records) if r.get(name)), {})
        return "\n".join(f"{key} {form(value)}" for key, value in found.items() if value is not None)

    return cell


def _ranks(records: list[Record]) -> str:
    found = next((r for r in reversed(records) if r.get("flux/slowest_rank") is not None), None)
    if found is None:
        return ""
    spread = found.get("flux/rank_spread_ms")
    return f"{found['flux/slowest_rank']}" + (f" ({milliseconds(spread)} ms)" if spread is not None else "")


def _memory(records: list[Record]) -> str:
    own = [record for record in records if record.get("schema", 1) >= OWN_SINCE]
    return _last("peak-memory-bytes", memory)(own)


_ROWS: dict[str, Callable[[list[Record]], str]] = {
    f"step time, last (median of {RECENT}), ms": _step_time,
    "loss": _last("lm loss", lambda value: f"{value:.4f}"),
    "gradient norm": _last("grad-norm", lambda value: f"{value:.3f}"),
    "learning rate": _last("learning-rate", lambda value: f"{value:.2e}"),
    "tokens/s": _last("tokens-per-second", rate),
    "TFLOP/s per GPU": _last("throughput", rate),
    "MFU": _last("mfu", lambda value: f"{100 * value:.1f} %"),
    "peak memory": _memory,
    "active flux layers": _last("flux/active_layers", str),
    "calls left to stock, per step": _last("flux/fallback_calls", str),
    "overlap efficiency": _sampled("flux/e_overlap", lambda value: f"{100 * value:.0f} %"),
    "exposed communication (waits in kernels too), ms": _sampled("flux/exposed_communication_ms", milliseconds),
    "slowest rank (spread)": _ranks,
    "GPUs": _sampled("flux/gpu", lambda value: f"{value:.0f}"),
    "throttled GPUs": _sampled("flux/throttle_reasons", str),
    "waits that ran into their limit": _last("flux/wait_timeouts", str),
}
