"""Timing several ways to make one call against each other, on all ranks of a group at once.

:func:`interleaved`: short bursts in an order that changes every round, since clocks fall while a round lasts.
:func:`sustained`: one way for as long as it takes the GPU to settle at the clock that its power limit leaves to this
way alone, which is what a training's clock is made of. Every number is the slowest rank's. Device time between CUDA
events; on the CPU the host's clock.

Why both: a GEMM takes 1.53 ms in bursts from idle and 1.83 in the long run (results/power-h200). Bursts in turns share
one clock, so that who needs more energy slows the others as much as itself: on four GPUs tiles of 128 x 128 were up to
2.4 % ahead of 128 x 256 in six of 16 calls, and by themselves 6 to 10 % slower in each (results/layer-h200x4-ahead).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.pending import Pending

ROUNDS, BURST = 7, 4

SETTLE, LASTING, TURNS = 0.25, 0.3, 2
"""Of a sustained measurement: seconds before and while it is timed, and how often."""


def interleaved(
    ways: Mapping[str, Callable[[], Any]], group: dist.ProcessGroup, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds per call of the slowest rank, by way, one number per round. A collective call.

    Args:
        ways: what to time; the same names in the same order on all ranks. The first decides how many calls one burst
            has: short calls are bound by host time, which a burst must be long enough to show.
        group: the ranks that make the calls together.
        device: where the calls run.
    """
    names = list(ways)
    times = torch.zeros(len(names), ROUNDS)
    count = max(BURST, min(50, int(4.0 / max(burst(ways[names[0]], BURST, group, device), 0.01))))
    for turn in range(ROUNDS):
        order = list(enumerate(names))
        random.Random(turn).shuffle(order)  # noqa: S311 - the same order on all ranks, another every round
        for i, name in order:
            times[i, turn] = burst(ways[name], count, group, device)
    return dict(zip(names, times.tolist(), strict=True))


def sustained(
    ways: Mapping[str, Callable[[], Any]], ms: Mapping[str, float], group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Milliseconds per call of the slowest rank, by way, each running by itself for a while. A collective call.

    Args:
        ways: what to time; the same names in the same order on all ranks.
        ms: about how long a call of each takes; the same on all ranks.
        group: the ranks that make the calls together.
        device: where the calls run.
    """
    found = dict.fromkeys(ways, 0.0)
    for turn in range(TURNS):
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            warm, count = (max(1, round(1e3 * seconds / ms[name])) for seconds in (SETTLE, LASTING))
            found[name] += burst(ways[name], count, group, device, warm) / TURNS
    return found


def all_agree(mine: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether every rank of ``group`` says so."""
    flag = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def burst(call: Callable[[], Any], count: int, group: dist.ProcessGroup, device: torch.device, warm: int = 1) -> float:
    """Milliseconds of one of ``count`` back-to-back calls behind ``warm`` others, on the slowest rank."""
    mine = (_on_device if device.type == "cuda" else _on_host)(call, count, group, warm)
    slowest = torch.tensor(mine, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _on_device(call: Callable[[], Any], count: int, group: dist.ProcessGroup, warm: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier(group=group)
    for _ in range(warm):
        finish(call())
    start.record()
    for _ in range(count):
        finish(call())
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def _on_host(call: Callable[[], Any], count: int, group: dist.ProcessGroup, warm: int) -> float:
    dist.barrier(group=group)
    for _ in range(warm):
        finish(call())
    began = time.perf_counter()
    for _ in range(count):
        finish(call())
    return (time.perf_counter() - began) * 1e3 / count


def finish(result: Any) -> None:
    """Wait for what an asynchronous call has begun."""
    if isinstance(result, Pending):
        result.wait()
