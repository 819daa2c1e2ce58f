"""A running job in a terminal, from its records alone: it needs no connection to the job, only to its folder."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from megatron_flux.errors import UserError
from megatron_flux.metrics.statistics import median_of, paired_blocks, speedup_interval
from megatron_flux.metrics.summary import ARMS, read_json_object
from megatron_flux.metrics.tail import Tail

RECENT = 20
"""Steps that "recent" speaks of."""


@dataclass
class Watched:
    """A run folder that is looked at again and again."""

    path: Path
    tails: dict[str, Tail] = field(init=False)
    config: dict[str, Any] = field(default_factory=dict, init=False)
    _interval: tuple[int, list[float] | None] = field(default=(0, None), init=False)

    def __post_init__(self) -> None:
        """Nothing is read yet."""
        self.tails = {arm: Tail(self.path / arm / "metrics.jsonl") for arm in ARMS}

    def look(self) -> bool:
        """Read what is new; False while there is no run yet.

        Raises:
            UserError: a file cannot be read.
        """
        if not self.config and (self.path / "config.json").exists():
            self.config = read_json_object(self.path / "config.json")
        for tail in self.tails.values():
            try:
                tail.poll()
            except OSError as error:
                raise UserError(f"cannot read {tail.path}: {error.strerror}; name a folder that you may read") from None
        return bool(self.config) or any(tail.records for tail in self.tails.values())

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was asked for; empty when that is not known."""
        inner = self.config.get("config")
        return inner if isinstance(inner, dict) else {}

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
    def done(self) -> bool:
        """Every arm has done all its steps."""
        steps = self.steps
        return steps is not None and all(self.last_iteration(arm) >= steps for arm in self.arms)

    def last_iteration(self, arm: str) -> int:
        """Of the arm's last record; 0 before the first."""
        records = self.tails[arm].records
        return records[-1]["iteration"] if records else 0

    def remaining_s(self) -> float | None:
        """Seconds to the end at the pace of the recent steps of each arm."""
        if self.steps is None:
            return None
        total = 0.0
        for arm in self.arms:
            pace = median_of(self.tails[arm].records[-RECENT:], "iteration-time")
            if pace is None:
                return None
            total += pace * max(0, self.steps - self.last_iteration(arm))
        return total

    def speedup_interval(self) -> list[float] | None:
        """The interval of the speed-up so far, made anew when a pair of blocks has been added: it takes a while."""
        pairs = paired_blocks(*(self.tails[arm].records for arm in ARMS))
        if self._interval[0] != len(pairs):
            self._interval = (len(pairs), speedup_interval(pairs))
        return self._interval[1]

    def silent_s(self, now: float) -> float | None:
        """Seconds since the last record of any arm, by the file's time."""
        times = [tail.path.stat().st_mtime for tail in self.tails.values() if tail.path.exists()]
        return max(0.0, now - max(times)) if times else None


def watch(path: Path, *, interval: float = 1.0, once: bool = False, wait: float = 60.0) -> None:
    """Show a run until it has done all its steps, or Ctrl-C; once where standard output is no terminal.

    Args:
        path: the run folder.
        interval: seconds between looks.
        once: print the table as it is now, and return.
        wait: seconds to wait for the run to appear.

    Raises:
        UserError: no run appeared, it is no training run, or it cannot be read.
    """
    from megatron_flux.metrics.watch_view import view

    watched = Watched(path)
    console = Console(highlight=False, emoji=False)
    once = once or not console.is_terminal
    try:
        _await(watched, wait, interval)
        if once:
            console.print(view(watched, time.time()))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(view(watched, time.time()), refresh=True)
                if watched.done:
                    return
                time.sleep(interval)
                watched.look()
    except KeyboardInterrupt:
        return


def _await(watched: Watched, wait: float, interval: float) -> None:
    if watched.path.exists() and not watched.path.is_dir():
        raise UserError(f"{watched.path} is not a folder; name the run folder of a training job")
    until = time.monotonic() + wait
    while not watched.look():
        if time.monotonic() >= until:
            what = "has no run in it" if watched.path.is_dir() else "is missing"
            raise UserError(f"{watched.path} {what}; name the run folder of a training job (--wait S waits for it)")
        time.sleep(min(interval, 0.5))
    if watched.settings and not {"steps", "preset"} & set(watched.settings):
        raise UserError(f"{watched.path} is a benchmark, which has no steps; `megatron-flux report` shows it")
