"""Joint decisions and measurements of ranks: every time is the slowest rank's, every yes is everybody's."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import WorkerPool, on_ranks

SLOW_MS = 30
CPU = torch.device("cpu")


def step_of(slow: int) -> Any:
    return lambda: time.sleep(SLOW_MS / 1e3 if dist.get_rank() == slow else 0)


@on_ranks("world2")
def test_all_agree_only_if_every_rank_does() -> None:
    from megatron_flux.ops import timing

    answers = (True, True), (True, False), (False, True), (False, False)
    for answer in answers:
        assert timing.all_agree(answer[dist.get_rank()], dist.group.WORLD) == all(answer)


def rank_bursts(slow: int) -> tuple[float, list[float]]:
    from megatron_flux.ops import timing

    step, group = step_of(slow), dist.group.WORLD
    once = timing.burst(step, 1, group, CPU, warm=0)
    return once, timing.rounds({"step": step}, group, CPU, 2, 1)["step"].ms


@pytest.mark.parametrize("slow", [0, 1])
def test_a_burst_takes_as_long_as_on_the_slowest_rank(world2: WorkerPool, slow: int) -> None:
    found = world2.run(rank_bursts, slow)
    assert found[0] == found[1]
    once, bursts = found[0]
    assert min(once, *bursts) >= SLOW_MS


def rank_rounds(slow: int) -> tuple[list[float], list[float]]:
    from megatron_flux.bench.harness import Ranks, Variant, measure
    from megatron_flux.comm.links import Link

    here = Ranks(CPU, dist.group.WORLD, dist.group.WORLD, Link("none", ""), print)
    samples = measure([Variant("step", step_of(slow))], here, rounds=2, burst=1)["step"]
    return samples["step_ms"], samples["host_ms"]


@pytest.mark.parametrize("slow", [0, 1])
def test_rounds_tell_of_the_slowest_rank(world2: WorkerPool, slow: int) -> None:
    found = world2.run(rank_rounds, slow)
    assert found[0] == found[1]
    steps, hosts = found[0]
    assert len(steps) == len(hosts) == 2
    assert min(*steps, *hosts) >= SLOW_MS
