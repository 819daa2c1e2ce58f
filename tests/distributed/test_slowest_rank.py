"""Joint decisions and measurements of ranks: every time is the slowest rank's, every yes is everybody's."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm.links import Link
from megatron_flux.ops import timing
from tests.distributed.pool import on_ranks

SLOW_MS = 30
CPU = torch.device("cpu")


def step_of(slow: int) -> Any:
    return lambda: time.sleep(SLOW_MS / 1e3 if dist.get_rank() == slow else 0)


def alike_and_slow(ms: list[float]) -> None:
    both: list[Any] = [None, None]
    dist.all_gather_object(both, ms)
    assert both[0] == both[1]
    assert min(ms) >= SLOW_MS


@on_ranks("world2")
def test_all_agree_only_if_every_rank_does() -> None:
    answers = (True, True), (True, False), (False, True), (False, False)
    for answer in answers:
        assert timing.all_agree(answer[dist.get_rank()], dist.group.WORLD) == all(answer)


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks("world2")
def test_a_burst_takes_as_long_as_on_the_slowest_rank(slow: int) -> None:
    step, group = step_of(slow), dist.group.WORLD
    once = timing.burst(step, 1, group, CPU, warm=0)
    alike_and_slow([once, *timing.rounds({"step": step}, group, CPU, 2, 1)["step"].ms])


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks("world2")
def test_rounds_tell_of_the_slowest_rank(slow: int) -> None:
    from megatron_flux.bench.harness import Ranks, Variant, measure

    here = Ranks(CPU, dist.group.WORLD, dist.group.WORLD, Link("none", ""), print)
    samples = measure([Variant("step", step_of(slow))], here, rounds=2, burst=1)["step"]
    assert len(samples["step_ms"]) == len(samples["host_ms"]) == 2
    alike_and_slow([*samples["step_ms"], *samples["host_ms"]])
