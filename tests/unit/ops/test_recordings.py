"""Calls over a link through host memory that are recorded and replayed, in every order that streams allow."""

from __future__ import annotations

import functools
import logging
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from megatron_flux import ops
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import OperatorError
from megatron_flux.ops import recordings
from megatron_flux.ops.backends.chunked import ChunkedPlan
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.recordings import Recordings
from tests.unit.ops.fakes import called
from tests.unit.ops.test_chunked_path import MP, Scene, integers, ran, scene

__all__ = ["scene"]

N, K = 5, 40
OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")


class Reused:
    """Gives the calls of each turn the same memory, as an allocator does in step after step."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.empty = scene, scene.allocate
        self.made: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.given: Counter[Any] = Counter()

    def begin(self, *, anew: bool = False) -> None:
        """Begin a turn, on memory that was never given if ``anew``."""
        self.given.clear()
        if anew:
            self.made.clear()
        self.scene.allocate = self.allocate

    def allocate(self, like: torch.Tensor, shape: Any, dtype: Any = None) -> torch.Tensor:
        made, number = self.made[tuple(shape)], self.given[tuple(shape)]
        if number == len(made):
            made.append(self.empty(like, shape, dtype=dtype))
        self.given[tuple(shape)] += 1
        return made[number]


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "SPACING", 1)


def call(backend: Any, made: dict[str, Recordings], group: Any, operator: str, *operands: Any, **how: Any) -> Any:
    return ran(backend, OperatorCall(operator, *operands, group, **how), made[operator])


@pytest.mark.parametrize("seed", range(12))
def test_replays_among_other_calls_give_the_same_in_every_order(scene: Scene, seed: int) -> None:
    """Memory comes again but in one turn, on one rank. Calls that are never recorded are among them, open and closed.
    What a call reads is written just before it begins, and all its memory is written over as soon as it has ended.
    """
    rng, backend, cuda = random.Random(seed), scene.backend, scene.cuda
    found = [{name: Recordings() for name in OPERATORS} for _ in range(2)]
    memory = [
        [torch.zeros(*shape) for shape in ((MP, K), (MP, K), (2 * MP, N), (2 * MP, N), (N, K), (K, N))]
        for _ in range(2)
    ]
    other, at_random = rng.randrange(2), [rng.random() < 0.3 for _ in range(7)]
    scene.idle = lambda: rng.random() < 0.7
    torch.manual_seed(seed)
    reused = [Reused(scene) for _ in range(2)]
    for turn in range(7):
        w, v = integers(N, K), integers(K, N)
        shards, others, wholes = ([integers(rows, k) for _ in range(2)] for rows, k in ((MP, K), (MP, K), (2 * MP, N)))
        gathered, sums = torch.cat(shards), sum(whole @ v.t() for whole in wholes)
        want = gathered, gathered @ w.t(), sums, torch.cat(others)
        seen: list[list[torch.Tensor]] = []
        for rank, group in scene.on_ranks():
            reused[rank].begin(anew=turn == 4 and rank == other)
            x, beside, whole, read, *weights = mine = memory[rank]
            for to, one in zip(mine, (shards[rank], others[rank], wholes[rank], wholes[rank], w, v), strict=True):
                to.copy_(one)
            made = found[rank]

            of = functools.partial(call, backend, made, group)
            y, full = of("all_gather_gemm", x, weights[0])
            opened = of("all_gather", beside, None)
            left = of("gemm_reduce_scatter", read, weights[1], async_op=True) if at_random[turn] else None
            cuda.put(functools.partial(read.fill_, 9.0))
            if turn % 3 == 1:  # beside two open calls
                y, full = of("all_gather_gemm", x, weights[0])
            rows = opened.wait() if turn % 2 else None
            z = of("gemm_reduce_scatter", whole, weights[1]).wait()
            rows = opened.wait()
            results = [full, y, z, rows, *([] if left is None else [left.wait()])]
            seen.append(scene.taken(results, mine))
        scene.finish(rng)
        for rank, mine in enumerate(seen):
            share = want[2][rank * MP : (rank + 1) * MP]
            assert all(map(torch.equal, mine, (*want[:2], share, want[3], share)))
    assert cuda.asked.count("replay") >= 25


def repeat(scene: Scene, times: int, made: Recordings, memory: Reused | None = None) -> list[bool]:
    """Return for each call on the same memory if it was replayed."""
    (_, group), *_ = scene.on_ranks()
    x, w, replayed, memory = integers(MP, K), integers(N, K), [], memory or Reused(scene)
    for _ in range(times):
        memory.begin()
        scene.cuda.asked.clear()
        call(scene.backend, {"all_gather_gemm": made}, group, "all_gather_gemm", x, w)
        replayed.append("replay" in scene.cuda.asked)
    return replayed


def test_a_replay_is_four_calls_of_the_driver_and_few_of_python(scene: Scene) -> None:
    (_, group), *_ = scene.on_ranks()
    x, w, memory = integers(MP, K), integers(N, K), Reused(scene)
    asked = OperatorCall("all_gather_gemm", x, w, group)
    state_of(group).plans["auto", asked.key] = plan = ChunkedPlan(scene.backend, asked, None)
    plan.counted, plan.recordings = (asked.operator, "chunked"), Recordings()
    for _ in range(3):
        memory.begin()
        scene.cuda.asked.clear()
        functions = called(lambda: ops.all_gather_gemm(x, w, group, return_gathered=True))
    assert scene.cuda.asked == ["record", "record", "record", "replay"]
    assert len(functions) <= 36, functions


def test_what_cannot_be_recorded_runs_and_says_so_once(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refused)
    with caplog.at_level(logging.WARNING, "megatron_flux"):
        assert repeat(scene, 4, Recordings()) == [False] * 4
    assert len(caplog.records) == 1
    assert "all_gather_gemm over host memory cannot be recorded" in caplog.text
    assert "not permitted" in caplog.text


@pytest.mark.parametrize("idle", [True, False])
def test_open_products_are_replayed_only_where_the_gpu_is_close_behind_the_host(scene: Scene, idle: bool) -> None:
    (_, group), *_ = scene.on_ranks()
    whole, v, memory, made = integers(2 * MP, N), integers(K, N), Reused(scene), Recordings()
    scene.idle = lambda: idle
    for _ in range(3):
        memory.begin()
        scene.cuda.asked.clear()
        call(scene.backend, {"gemm_reduce_scatter": made}, group, "gemm_reduce_scatter", whole, v, async_op=True).wait()
    assert ("replay" in scene.cuda.asked) == idle


def test_a_link_that_is_broken_replays_nothing(scene: Scene) -> None:
    made, memory = Recordings(), Reused(scene)
    assert repeat(scene, 2, made, memory)[-1]
    scene.links[0].alarm.view[0] = 1
    scene.cuda.asked.clear()
    with pytest.raises(OperatorError, match="broken off"):
        repeat(scene, 1, made, memory)
    assert not {"replay", "words", "copy"} & {*scene.cuda.asked}
