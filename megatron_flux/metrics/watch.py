"""``megatron-flux watch``: a running job in a terminal of 80 columns, from the records in its folder alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import RecordTail
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import (
    ARMS,
    OWN_MEMORY_SINCE,
    Record,
    median_of,
    paired_blocks,
    speedup_interval,
    timed,
)
from megatron_flux.metrics.table import Form, memory, milliseconds, percent, rate

RECENT = 20
"""Steps that "recent" speaks of."""

STALL_S, STALL_STEPS = 30.0, 10.0
"""A run without a record for this long, and for this many usual steps, is reported as stalled."""


def watch(path: Path, *, interval: float = 1.0, once: bool = False, wait: float = 60.0) -> None:
    """Show a run until it has done all its steps, or Ctrl-C; once where standard output is no terminal.

    ``interval`` is seconds between looks, ``wait`` seconds for the run to appear.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; name the run folder of a training job")
    watched = Watched(path)
    console = Console(highlight=False, emoji=False)
    until = time.monotonic() + wait
    try:
        while not watched.look():
            if time.monotonic() >= until:
                what = "has no run in it" if path.is_dir() else "is missing"
                raise UserError(f"{path} {what}; name the run folder of a training job (--wait S waits for it)")
            time.sleep(min(interval, 0.5))
        if watched.settings and not {"steps", "preset"} & set(watched.settings):
            raise UserError(f"{path} is a benchmark, which has no steps; `megatron-flux report` shows it")
        if once or not console.is_terminal:
            console.print(view(watched, time.time()))
            return
        with Live(console=console, auto_refresh=False) as live:
            live.update(view(watched, time.time()), refresh=True)
            while not watched.done:
                time.sleep(interval)
                watched.look()
                live.update(view(watched, time.time()), refresh=True)
    except KeyboardInterrupt:
        return


class Watched:
    """A run folder that is read repeatedly."""

    def __init__(self, path: Path) -> None:
        """Nothing is read yet."""
        self.path = path
        self.tails = {arm: RecordTail(path / arm / "metrics.jsonl") for arm in ARMS}
        self.config: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self._interval: tuple[int, list[float] | None] = (0, None)

    def look(self) -> bool:
        """Read what is new; False while there is no run yet, UserError where a file cannot be read."""
        if not self.config and (self.path / "config.json").exists():
            self.config = read_json_object(self.path / "config.json")
            asked = self.config.get("config")
            self.settings = asked if isinstance(asked, dict) else {}
        for tail in self.tails.values():
            tail.poll()
        return bool(self.config) or any(tail.records for tail in self.tails.values())

    @property
    def steps(self) -> int | None:
        """Steps that each arm will do."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def arms(self) -> list[str]:
        """The arms that there are or will be."""
        if self.settings.get("command") == "compare":
            return list(ARMS)
        known = [arm for arm, tail in self.tails.items() if tail.records]
        return known or ["flux" if self.settings.get("flux", True) else "baseline"]

    @property
    def last(self) -> dict[str, int]:
        """Iteration of each arm's last record; 0 before the first."""
        every = {arm: self.tails[arm].records for arm in self.arms}
        return {arm: records[-1]["iteration"] if records else 0 for arm, records in every.items()}

    @property
    def done(self) -> bool:
        """Every arm has done all its steps."""
        return self.steps is not None and min(self.last.values()) >= self.steps

    def speedup_interval(self) -> list[float] | None:
        """The interval of the speed-up so far, computed again when a pair of blocks was added: it takes a while."""
        pairs = paired_blocks(*(self.tails[arm].records for arm in ARMS))
        if self._interval[0] != len(pairs):
            self._interval = (len(pairs), speedup_interval(pairs))
        return self._interval[1]


def view(watched: Watched, now: float) -> Group:
    """Title, progress, the table as it stands, and what else there is to know below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for arm in watched.arms:
        table.add_column(arm, justify="right", style="cyan" if arm == "baseline" else "yellow")
    for label, cell in _ROWS.items():
        cells = [cell(watched.tails[arm].records) for arm in watched.arms]
        if any(cells):
            table.add_row(label, *(Text(text or "-") for text in cells))
    lines = (Text(line, style=style) for line, style in _remarks(watched, now))
    return Group(Text(_title(watched)), Text(_progress(watched), style="bold"), table, *lines)


def _title(watched: Watched) -> str:
    device, layout = watched.config.get("device"), watched.config.get("layout")
    words = [str(watched.path), str(watched.settings.get("preset", ""))]
    if isinstance(device, dict) and len(device) > 1:
        words.append(f"{device['count']} x {device['name']}")
    if isinstance(layout, dict):
        words.append(" ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp") if name in layout))
    return ", ".join(filter(None, words))


def _progress(watched: Watched) -> str:
    steps, last = watched.steps, watched.last
    if not steps:
        return ", ".join(f"{arm} {iteration}" for arm, iteration in last.items())
    parts = [f"{arm} {iteration} of {steps} ({100 * iteration / steps:.0f} %)" for arm, iteration in last.items()]
    # At the pace of the recent steps of each arm.
    paces = {arm: median_of(watched.tails[arm].records[-RECENT:], "iteration-time") for arm in last}
    if watched.done:
        parts.append("all steps done")
    elif None not in paces.values():
        parts.append(f"{duration(sum(paces[arm] * max(0, steps - last[arm]) for arm in last))} left")
    return ", ".join(parts)


def _remarks(watched: Watched, now: float) -> list[tuple[str, str]]:
    """Lines with their style."""
    lines: list[tuple[str, str]] = []
    baseline, flux = (watched.tails[arm].records for arm in ARMS)
    paces = [median_of(timed(records), "iteration-time") for records in (baseline, flux)]
    device = watched.config.get("device")
    if isinstance(device, dict) and device.get("kind") == "cpu":
        lines.append(("no GPU: the losses can be compared, the speed cannot", ""))
    elif all(paces):
        interval = watched.speedup_interval()
        shown = f" (95 %: {interval[0]:.3f} to {interval[1]:.3f})" if interval else ", too few blocks for an interval"
        lines.append((f"speed-up so far {paces[0] / paces[1]:.3f}{shown}", "bold"))
    for reason, calls in (flux[-1]["flux/fallbacks"] if flux else {}).items():
        lines.append((f"{calls} calls left to stock: {reason}", "yellow"))
    written = [tail.path.stat().st_mtime for tail in watched.tails.values() if tail.path.exists()]
    if written and not watched.done:
        silent = max(0.0, now - max(written))
        stalled = silent > max(STALL_S, STALL_STEPS * max(pace or 0.0 for pace in paces))
        lines.append((f"last record {duration(silent)} ago{': stalled, or ended' * stalled}", "red" * stalled))
    # The last line of a running job may be half written: only whole lines can be damaged.
    lines += [
        (f"{arm}/metrics.jsonl: {found}", "red")
        for arm in watched.arms
        for found in watched.tails[arm].problems(ended=False)
    ]
    return lines


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _last(name: str, form: Form, since: int = 1) -> Callable[[list[Record]], str]:
    """The last known value of a field in records of schema version ``since`` or later; of an object an entry a line."""

    def cell(records: list[Record]) -> str:
        known = (r[name] for r in reversed(records) if r.get(name) not in (None, {}) and r.get("schema", 1) >= since)
        value = next(known, {})
        if isinstance(value, dict):
            return "\n".join(f"{key} {form(item)}" for key, item in value.items() if item is not None)
        return form(value) if math.isfinite(value) else str(value)

    return cell


def _step_time(records: list[Record]) -> str:
    if not records:
        return ""
    recent = median_of(records[-RECENT:], "iteration-time") or 0.0
    return f"{milliseconds(1000 * records[-1]['iteration-time'])} ({milliseconds(1000 * recent)})"


def _ranks(records: list[Record]) -> str:
    found = next((r for r in reversed(records) if r.get("flux/slowest_rank") is not None), {})
    spread = found.get("flux/rank_spread_ms")
    return str(found.get("flux/slowest_rank", "")) + (f" ({milliseconds(spread)} ms)" if spread is not None else "")


_ROWS: dict[str, Callable[[list[Record]], str]] = {
    f"step time, last (median of {RECENT}), ms": _step_time,
    "loss": _last("lm loss", "{:.4f}".format),
    "gradient norm": _last("grad-norm", "{:.3f}".format),
    "learning rate": _last("learning-rate", "{:.2e}".format),
    "tokens/s": _last("tokens-per-second", rate),
    "TFLOP/s per GPU": _last("throughput", rate),
    "MFU": _last("mfu", lambda value: percent(value, 1)),
    "peak memory": _last("peak-memory-bytes", memory, since=OWN_MEMORY_SINCE),
    "active flux layers": _last("flux/active_layers", str),
    "calls left to stock, per step": _last("flux/fallback_calls", str),
    "overlap efficiency": _last("flux/e_overlap", lambda value: f"{100 * value:.0f} %"),
    "exposed communication (waits in kernels too), ms": _last("flux/exposed_communication_ms", milliseconds),
    "slowest rank (spread)": _ranks,
    "GPUs": _last("flux/gpu", "{:.0f}".format),
    "throttled GPUs": _last("flux/throttle_reasons", str),
    "waits that ran into their limit": _last("flux/wait_timeouts", str),
}
