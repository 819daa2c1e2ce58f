"""``megatron-flux watch``: follow a running job in a terminal of 80 columns, from the records in its folder alone."""

from __future__ import annotations

import math
import time
from collections import defaultdict
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
from megatron_flux.metrics.report.run import json_or_problem, load
from megatron_flux.metrics.summary import ARMS, Record, fallbacks_of, median_of, timed
from megatron_flux.metrics.table import Form, memory, milliseconds, percent, rate

RECENT = 20
"""Steps whose median is the recent step time."""

STALL_S, STALL_STEPS = 30.0, 10.0
"""A run without a record for this long, and for this many usual steps, is reported as stalled."""

START_S = 900.0
"""So long a start may be without a step: pre-flight, tuning, compilation, a big checkpoint."""

WAIT_S = 60.0
"""How long a pipe waits for a run to appear."""


def watch(path: Path, *, interval: float = 1.0, once: bool = False, wait: float | None = None) -> None:
    """Show a run until it has ended, or Ctrl-C; once if standard output is no terminal.

    ``interval`` is seconds between looks, ``wait`` seconds for the run to appear: by default no limit in a terminal,
    else :data:`WAIT_S`. Raises UserError: no run has appeared by then, or the folder is not a training's.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder; name the run folder of a training job")
    watched = Watched(path)
    console = Console(highlight=False, emoji=False)
    following = console.is_terminal and not once
    wait = (math.inf if following else WAIT_S) if wait is None else wait
    until = time.monotonic() + wait
    try:
        if not watched.look() and wait:
            Console(stderr=True, highlight=False).print(
                f"waiting for a run in {path}; Ctrl-C ends", markup=False, soft_wrap=True
            )
        while not watched.look():
            if time.monotonic() >= until:
                what = "has no run in it" if path.is_dir() else "is missing"
                raise UserError(f"{path} {what}; name the run folder of a training job (--wait S waits for it)")
            time.sleep(min(interval, 0.5))
        if watched.settings and not {"steps", "preset"} & set(watched.settings):
            raise UserError(f"{path} is a benchmark, which has no steps; `megatron-flux report` shows it")
        if not following:
            console.print(view(watched, time.time()))
            return
        with Live(console=console, auto_refresh=False) as live:
            live.update(view(watched, time.time()), refresh=True)
            while watched.end is None:
                time.sleep(interval)
                watched.look()
                live.update(view(watched, time.time()), refresh=True)
    except KeyboardInterrupt:
        return


class Watched:
    """A run folder that is read repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tails = {arm: RecordTail(path / arm / "metrics.jsonl") for arm in ARMS}
        self.config: dict[str, Any] = {}
        self.problems: list[str] = []
        """Files beside the records that are damaged."""
        self.begun = 0.0
        """Unix time of the latest start: a resumed run writes its configuration anew. What is older ended another."""
        self.end: tuple[str, str] | None = None
        """How the run ended, in words and their colour; None while it runs, as far as its files say."""

    def look(self) -> bool:
        """Read what is new; return False while there is no run yet."""
        file = self.path / "config.json"
        if file.exists() and (begun := file.stat().st_mtime) > self.begun:  # for the first time, or anew
            self.problems.clear()
            self.config, self.begun = json_or_problem(file, self.problems), begun
        for tail in self.tails.values():
            tail.poll()
        self.end = self._end()
        return self.begun > 0 or any(tail.records for tail in self.tails.values())

    @property
    def settings(self) -> dict[str, Any]:
        """The requested configuration."""
        settings = self.config.get("config")
        return settings if isinstance(settings, dict) else {}

    @property
    def steps(self) -> int | None:
        """Steps that each side will do."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def arms(self) -> list[str]:
        """The sides that there are or will be."""
        if self.settings.get("command") == "compare":
            return list(ARMS)
        known = [arm for arm, tail in self.tails.items() if tail.records]
        return known or ["flux" if self.settings.get("flux", True) else "baseline"]

    @property
    def last(self) -> dict[str, int]:
        """Iteration of each side's last record; 0 before the first."""
        every = {arm: self.tails[arm].records for arm in self.arms}
        return {arm: records[-1]["iteration"] if records else 0 for arm, records in every.items()}

    def _end(self) -> tuple[str, str] | None:
        if (file := self.path / "ended.json").exists():
            state = str(json_or_problem(file, self.problems).get("state", "unknown"))
            if state == "finished":
                return ended(state), "green"
            at = ", ".join(f"{arm} after step {iteration}" for arm, iteration in self.last.items())
            return f"{ended(state)}, {at}", "yellow"
        notes = [note for arm in ARMS for note in (self.path / arm).glob("failure-rank*.json")]
        if failed := [note for note in notes if note.stat().st_mtime >= self.begun]:
            first = json_or_problem(min(failed, key=lambda note: note.stat().st_mtime), self.problems)
            where = "rank {rank} on {host} after step {iteration}: {error}".format_map(defaultdict(lambda: "?", first))
            return f"ended by an error, {where}", "red"
        return None

    def verdict(self) -> str:
        """Return the report's verdict at the end; before, the ratio so far, once both sides have timed a step."""
        if self.end is not None and self.end[1] == "green":
            return load(self.path).verdict
        medians = {arm: median_of(timed(tail.records), "iteration-time") for arm, tail in self.tails.items()}
        baseline, flux = medians["baseline"], medians["flux"]
        return f"so far: flux {baseline / flux:.3g}x" if baseline and flux else ""


def view(watched: Watched, now: float) -> Group:
    """Return title, progress, the table as it is now, and remarks below it."""
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
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} x {device.get('name', '?')}")
    if isinstance(layout, dict):
        words.append(" ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp") if name in layout))
    return ", ".join(filter(None, words))


def _progress(watched: Watched) -> str:
    steps, last = watched.steps, watched.last
    if not steps:
        return ", ".join(f"{arm} {iteration}" for arm, iteration in last.items())
    parts = [f"{arm} {iteration} of {steps} ({100 * iteration / steps:.0f} %)" for arm, iteration in last.items()]
    paces = {arm: median_of(watched.tails[arm].records[-RECENT:], "iteration-time") for arm in last}
    if watched.end is None and None not in paces.values():
        parts.append(f"{duration(sum((paces[arm] or 0.0) * max(0, steps - last[arm]) for arm in last))} left")
    return ", ".join(parts)


def _remarks(watched: Watched, now: float) -> list[tuple[str, str]]:
    """Return lines with their style: the state, the verdict, calls left to stock, damage."""
    written = max((tail.path.stat().st_mtime for tail in watched.tails.values() if tail.path.exists()), default=0.0)
    usual = max(median_of(timed(watched.tails[arm].records), "iteration-time") or 0.0 for arm in watched.arms)
    # Without a configuration, the first record is the only sign of a start.
    state, stalled = activity(now, watched.begun or written, written if any(watched.last.values()) else None, usual)
    lines = [watched.end or (state, "red" if stalled else "")]
    if verdict := watched.verdict():
        lines.append((verdict, "bold"))
    for reason, calls in fallbacks_of(watched.tails["flux"].records).items():
        lines.append((f"{calls} calls left to stock: {reason}", "yellow"))
    lines += [(problem, "red") for problem in dict.fromkeys(watched.problems)]
    # The last line of a running job may be half written: only whole lines can be damaged.
    for arm in watched.arms:
        lines += [(f"{arm}/metrics.jsonl: {found}", "red") for found in watched.tails[arm].problems(ended=False)]
    return lines


def ended(state: str) -> str:
    """Describe the ``state`` of an ``ended.json``."""
    return "ended: " + {"finished": "all steps done", "stopped": "stopped by a signal"}.get(state, state)


def activity(now: float, began: float, written: float | None, usual: float) -> tuple[str, bool]:
    """Describe what a run that has not ended does, and return True if it has stalled.

    ``began`` is the Unix time of its latest start, ``written`` that of its last record (None: it has none, and one of
    before the start does not count), ``usual`` the seconds of a step, 0 if not known.
    """
    if written is None or written < began:
        silent = math.floor(max(0.0, now - began))
        stalled = silent > START_S
        return f"{'stalled' if stalled else 'running'}: started {duration(silent)} ago, no step since", stalled
    silent = math.floor(max(0.0, now - written))
    if silent <= max(STALL_S, STALL_STEPS * usual):
        return f"running: last step {duration(silent)} ago", False
    more = f", {silent / usual:.0f} times the usual {duration(usual)}" if usual else ""
    return f"stalled: no new step for {duration(silent)}{more}", True


def duration(seconds: float) -> str:
    """Format seconds in the unit that suits them."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 or seconds == int(seconds) else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _last(name: str, form: Form) -> Callable[[list[Record]], str]:
    """Format the last known value of a field; of an object one entry a line."""

    def cell(records: list[Record]) -> str:
        value: Any = next((r[name] for r in reversed(records) if r.get(name) not in (None, {})), {})
        if isinstance(value, dict):
            return "\n".join(f"{key} {form(item)}" for key, item in value.items() if item is not None)
        return form(value) if math.isfinite(value) else str(value)

    return cell


def _step_time(records: list[Record]) -> str:
    if not records:
        return ""
    recent = median_of(records[-RECENT:], "iteration-time") or 0.0
    return f"{milliseconds(1000 * records[-1]['iteration-time'])} ({milliseconds(1000 * recent)})"


_ROWS: dict[str, Callable[[list[Record]], str]] = {
    f"step time, last (median of {RECENT}), ms": _step_time,
    "loss": _last("lm loss", "{:.4f}".format),
    "gradient norm": _last("grad-norm", "{:.3f}".format),
    "learning rate": _last("learning-rate", "{:.2e}".format),
    "tokens/s": _last("tokens-per-second", rate),
    "TFLOP/s per GPU": _last("throughput", rate),
    "MFU": _last("mfu", lambda value: percent(value, 1)),
    "peak memory": _last("peak-memory-bytes", memory),
    "active flux layers": _last("flux/active_layers", str),
    "calls left to stock, per step": _last("flux/fallback_calls", str),
    "overlap efficiency": _last("flux/e_overlap", lambda value: f"{100 * value:.0f} %"),
    "exposed communication, ms": _last("flux/exposed_communication_ms", milliseconds),
    "slowest rank": _last("flux/slowest_rank", str),
    "spread of ranks, ms": _last("flux/rank_spread_ms", milliseconds),
    "GPUs": _last("flux/gpu", "{:.0f}".format),
    "throttled GPUs": _last("flux/throttle_reasons", str),
    "waits that reached their limit": _last("flux/wait_timeouts", str),
}
