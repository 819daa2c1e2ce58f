"""Timing several ways to make one call against each other, on all ranks of a group at once.

Ways are interleaved in an order that changes every round, since clocks fall while a round lasts; every number is the
slowest rank's. Device time between CUDA events; on the CPU the host's clock.
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


def burst(call: Callable[[], Any], count: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Milliseconds of one of ``count`` back-to-back calls, on the slowest rank."""
    mine = _on_device(call, count, group) if device.type == "cuda" else _on_host(call, count, group)
    slowest = torch.tensor(mine, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _on_device(call: Callable[[], Any], count: int, group: dist.ProcessGroup) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier(group=group)
    _finish(call())
    start.record()
    for _ in range(count):
        _finish(call())
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def _on_host(call: Callable[[], Any], count: int, group: dist.ProcessGroup) -> float:
    dist.barrier(group=group)
    _finish(call())
    began = time.perf_counter()
    for _ in range(count):
        _finish(call())
    return (time.perf_counter() - began) * 1e3 / count


def _finish(result: Any) -> None:
    if isinstance(result, Pending):
        result.wait()
