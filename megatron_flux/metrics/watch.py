"""``megatron-flux watch``: follow a running job in a terminal of 80 columns, from the records in its folder alone."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from megatron_flux.errors import UserError
from megatron_flux.metrics.run_files import RunFiles
from megatron_flux.metrics.summary import VARIANTS, median_of, summarize, timed
from megatron_flux.metrics.table import HEAD, findings, grid, rows, short

RECENT = 20  # steps whose median is the recent step time
STALL_S, STALL_STEPS = 30.0, 10.0
"""A run without a record for this long, and for this many usual steps, is reported as stalled."""
START_S = 900.0
"""Seconds that a start may take without a step: pre-flight, tuning, compilation, a big checkpoint."""
REFRESH_S = 3.0  # seconds between views: the interval of the speed-up takes longer the longer a run is


def watch(path: Path) -> None:
    """Show a run until it has ended, or Ctrl-C; without a terminal once. Raises UserError: there is no run."""
    watched = RunFiles(path)
    console = Console(highlight=False, emoji=False)
    if not watched.exists:
        if not console.is_terminal:
            what = "has no run in it" if path.exists() else "is missing"
            raise UserError(f"{path} {what}; name the run folder of a training job")
        console.print(f"waiting for a run in {path}; Ctrl-C ends", markup=False, soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        while not watched.exists:
            time.sleep(0.5)
            watched.poll()
        with Live(console=console, auto_refresh=False) as live:
            live.update(view(watched, time.time()), refresh=True)
            while watched.end() is None and console.is_terminal:
                time.sleep(REFRESH_S)
                watched.poll()
                live.update(view(watched, time.time()), refresh=True)


def view(watched: RunFiles, now: float) -> Group:
    """Return title, progress, the table of the summary so far, and lines below it."""
    summary = summarize(watched.records["baseline"], watched.records["flux"], watched.config)
    device = watched.config.get("device")
    words = [str(watched.path), str(watched.settings.get("preset", ""))]
    words += [f"{device.get('count', '?')} x {device.get('name', '?')}"] if isinstance(device, dict) else []
    lines = [Text(line, style=style) for line, style in _lines(watched, summary, now)]
    title = Text(", ".join(filter(None, words)))
    both = len(watched.variants) > 1
    columns = range(len(HEAD)) if both else (0, 1 + VARIANTS.index(watched.variants[0]))
    table = grid([HEAD[i] for i in columns], [[row[i] for i in columns] for row in rows(summary)])
    return Group(title, Text(_progress(watched), style="bold"), table, *lines)


def _progress(watched: RunFiles) -> str:
    steps, parts, left = watched.settings.get("steps"), [], 0.0
    total = steps if isinstance(steps, int) and steps > 0 else None
    for variant, done in watched.last.items():
        pace = median_of(watched.records[variant][-RECENT:], "iteration-time")
        of_all = f" of {total} ({100 * done / total:.0f} %)" if total else ""
        parts.append(f"{variant} {done}{of_all}" + (f", {short(1000 * pace)} ms a step" if pace else ""))
        left += max(0, total - done) * pace if total and pace else math.nan
    if watched.end() is None and math.isfinite(left):
        parts.append(f"{duration(left)} left")
    return "; ".join(parts)


def _lines(watched: RunFiles, summary: dict[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """Yield lines with their style: findings, the state, the verdict, damage."""
    both = len(watched.variants) > 1
    for label, text in findings(summary):
        if both or label == "fallback to stock":
            yield f"{label}: {text}", "yellow" if label == "note" else ""
    written = max((tail.path.stat().st_mtime for tail in watched.tails.values() if tail.path.exists()), default=0.0)
    usual = max(median_of(timed(watched.records[variant]), "iteration-time") or 0.0 for variant in watched.variants)
    # Without a configuration, the first record is the only sign of a start.
    state, stalled = activity(now, watched.begun or written, written if any(watched.last.values()) else None, usual)
    end = watched.end()
    yield end or (state, "red" if stalled else "")
    if both:
        yield f"{'' if end else 'so far: '}{summary['verdict']}", "bold"
    yield from ((problem, "red") for problem in dict.fromkeys(watched.problems))
    # The last line of a running job may be half written: only whole lines can be damaged.
    for variant in watched.variants:
        for problem in watched.tails[variant].problems(ended=False):
            yield f"{variant}/metrics.jsonl: {problem}", "red"


def activity(now: float, began: float, written: float | None, usual: float) -> tuple[str, bool]:
    """Describe what a run that has not ended does, and return True if it has stalled.

    Its start ``began`` and its last record was ``written`` at these Unix times; ``usual`` is a step's seconds, or 0.
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
