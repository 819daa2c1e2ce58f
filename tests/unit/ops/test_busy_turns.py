"""Which times of a trial count where the GPU waits for the host, and how turns of different numbers of rows compare."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import host_bound, trial
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED
from megatron_flux.ops.tuner.effects import Timed, effects_of

ENTRIES = [UNMEASURED, *(Entry(backend="fused", plan=KernelConfig(bn=bn)) for bn in (256, 128))]
GROUP: Any = SimpleNamespace(rank=lambda: 0)


class Turns:
    """A trial in which turns take times of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, entries: list[Entry] = ENTRIES, **how: int) -> None:
        monkeypatch.setattr(trial.agreement, "begin", lambda mine, group, about: lambda: [mine, mine])
        monkeypatch.setattr(trial, "_state", lambda *_: True)
        monkeypatch.setattr(trial, "_now", lambda cuda: SimpleNamespace(query=lambda: self.idle, ms=self.ms))
        monkeypatch.setattr(trial, "_between", lambda begin, end: end.ms)
        monkeypatch.setattr(trial.time, "perf_counter", lambda: self.clock)
        self.clock, self.host = 0.0, {0: 0.0, 1: 0.0, 2: 0.0}
        self.trial, self.idle, self.ms, self.calls = trial.Trial(entries, "a call", **how), False, 0.0, 0
        self.trial.begun |= {1: -1, 2: -1}

    def tick(self, ms: float) -> None:
        self.clock += ms / 1e3

    def call(self, *, idle: bool | set[int], ms: dict[int, float], m: int = 4096) -> bool:
        """Make one call; return whether the trial goes on. ``idle``: it finds the GPU so; if of these candidates."""
        turn = self.trial.turn(SimpleNamespace(m=m, group=GROUP))  # type: ignore[arg-type]
        self.calls += 1
        if turn is None:
            return False
        self.idle = idle if isinstance(idle, bool) else turn.candidate in idle
        self.ms = ms[turn.candidate]
        if turn.timed:
            end = self.trial.begin(turn.candidate, m, True)
            self.tick(self.host[turn.candidate])
            self.trial.enqueued(True)
            end()
        return True


BY_HOST = dict.fromkeys(range(3), 4.0)
"""Times of turns that find the GPU idle."""
Each = Callable[[], tuple[bool | set[int], dict[int, float]]]
"""Whether the next call finds the GPU idle, and what its turn takes, by candidate."""


def decided(turns: Turns, each: Each) -> Entry:
    while turns.calls < 500:
        idle, ms = each()
        if not turns.call(idle=idle, ms=ms):
            break
    assert turns.trial.decided is not None
    return turns.trial.decided


def test_times_of_the_host_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is likely runs, and the file does not get it."""
    for how, runs in (({}, ENTRIES[1].plan), ({"likely": 0}, None)):
        found = decided(Turns(monkeypatch, **how), lambda: (True, {0: 1.0, 1: 1.3, 2: 1.2}))
        assert (found.plan, found.ms) == (runs, {})


def test_turns_in_which_the_gpu_was_busy_count_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other call finds it idle, and then takes what the host takes."""
    turns = Turns(monkeypatch)
    by_host, truth = {0: 2.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 0.9, 2: 0.94}
    found = decided(turns, lambda: (False, truth) if turns.calls % 2 else (True, by_host))
    assert found.plan == KernelConfig(bn=256)


CHUNKED = [UNMEASURED, *(Entry(backend="chunked", pieces=count) for count in (2, 8))]


@pytest.mark.parametrize(
    ("share", "slower", "host", "pieces"),
    [(0.15, 1.05, 0.2, 2), (0.9, 1.05, 0.2, 8), (0.15, 1.05, 0.02, 8), (0.15, 1.2, 0.3, 8)],
)
def test_where_the_host_is_the_bound_its_time_counts(
    monkeypatch: pytest.MonkeyPatch, share: float, slower: float, host: float, pieces: int
) -> None:
    """A ``share`` of the later calls finds the GPU busy; the first ones say which candidates are about as fast. Eight
    pieces take the ``host`` so much longer than two. The likeliest one runs where a candidate never found it busy.
    """
    busy = False, {0: 3.0, 1: slower, 2: 1.0}
    for seed in range(20):
        turns, draw = Turns(monkeypatch, CHUNKED), random.Random(seed)
        turns.host = {0: 0.2, 1: 0.3, 2: 0.3 + host}
        found = decided(turns, lambda: busy if turns.calls < 12 or draw.random() < share else (True, BY_HOST))  # noqa: B023
        assert found.pieces in ({pieces} if turns.trial._sure([1, 2]) else {2, pieces})
        assert bool(found.ms) == (share == 0.9 or slower == 1.2)


def test_a_call_that_finds_the_gpu_idle_where_it_was_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work leaves the GPU behind the host for so long that stock's calls alone find it busy."""
    turns, draw = Turns(monkeypatch, CHUNKED), random.Random(0)

    def each() -> Any:
        late = 3.0 if draw.random() < 0.1 else 0.0
        turns.host = {i: ms + late for i, ms in {0: 0.25, 1: 0.5, 2: 0.6}.items()}
        return {0, 1, 2} if late else {1, 2}, {0: 0.5, 1: 0.4, 2: 0.4}

    assert decided(turns, each) == UNMEASURED


def medians(turns: list[Timed]) -> dict[int, float]:
    return {candidate: statistics.median(found) for candidate, found in effects_of(turns).items()}


def test_noise_and_an_outlier_do_not_decide() -> None:
    draw = random.Random(3)
    wrong = 0
    for _ in range(200):
        turns = []
        for _ in range(5):
            rows = draw.randrange(2048, 4096)  # a step, whose layers take turns
            for candidate, ratio in ((0, 1.0), (1, 0.93), (2, 1.02)):
                ms = (0.6 + 3e-5 * rows) * ratio * math.exp(draw.gauss(0, 0.02))
                turns.append(Timed(candidate, rows, ms * (20 if draw.random() < 0.05 else 1)))
        found = medians(turns)
        wrong += min(found, key=found.get) != 1  # type: ignore[arg-type]
    assert wrong <= 4


@pytest.mark.parametrize(("rows", "runs"), [((8, 8), None), ((8, 9), 0)])
def test_calls_that_will_be_replayed_take_the_host_what_a_replay_does(rows: tuple[int, int], runs: int | None) -> None:
    """Where calls keep their shape: elsewhere their memory does not come again."""
    turns = [Timed(i, row, 1.0, False, host) for row in rows for i, host in enumerate((0.2, 0.6))]
    assert host_bound.weighed(1, turns, [], {1: 0.14}) == runs
    assert host_bound.weighed(1, turns, [], {}) == 0
