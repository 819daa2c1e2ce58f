"""The interleaved timer of the tuner and of all benchmarks: ways to do one thing, timed against each other.

* :func:`rounds`: one burst of every way a round, in an order that changes every round, since the GPUs of one host
  throttle together and clocks fall while a measurement lasts. :func:`interleaved` is the tuner's form of it.
* :func:`sustained`: one way for as long as it takes the GPU to settle at the clock that its power limit leaves to this
  way alone, which is what a training's clock is made of.

A burst begins on idle GPUs behind a barrier. Calls ahead of the timed ones keep the GPU busy, so that neither the start
nor an empty queue is in the time. Every number is the slowest rank's: device time between CUDA events, on the CPU the
host's clock.

Why both: a GEMM takes 1.53 ms in bursts from idle and 1.83 in the long run (results/power-h200). Bursts in turns share
one clock, so that a way that needs more energy slows the others as much as itself: on four GPUs tiles of 128 x 128 were
up to 2.4 % ahead of 128 x 256 in six of 16 calls, and by themselves 6 to 10 % slower in each
(results/layer-h200x4-ahead).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending

ROUNDS, BURST = 7, 4

SETTLE, LASTING, TURNS = 0.25, 0.3, 2
"""Of a sustained measurement: seconds before and while it is timed, and how often."""

Way = Callable[[], Any]


@dataclass(frozen=True)
class Burst:
    """Milliseconds of one burst on this rank."""

    ms: float
    """Per timed call."""
    host_ms: float
    """To enqueue one of the timed calls, while the GPU is busy with those before."""
    first_host_ms: float
    """To enqueue one of the calls ahead of them."""


@dataclass(frozen=True)
class Samples:
    """As :class:`Burst`, of the slowest rank in each, one number per round."""

    ms: list[float]
    host_ms: list[float]
    first_host_ms: list[float]


def interleaved(ways: Mapping[str, Way], group: dist.ProcessGroup, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds per call of the slowest rank, by way, one number per round. A collective call.

    Args:
        ways: what to time; the same names in the same order on all ranks. The first decides how many calls one burst
            has: short calls are bound by host time, which a burst must be long enough to show.
        group: the ranks that make the calls together.
        device: where the calls run.
    """
    count = max(BURST, min(50, int(4.0 / max(burst(next(iter(ways.values())), BURST, group, device), 0.01))))
    return {name: found.ms for name, found in rounds(ways, group, device, ROUNDS, count).items()}


def rounds(
    ways: Mapping[str, Way],
    group: dist.ProcessGroup,
    device: torch.device,
    most: int,
    count: int,
    *,
    around: Callable[[str], AbstractContextManager[Any]] = lambda _: nullcontext(),
    barrier: Callable[[], object] | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> dict[str, Samples]:
    """Time a burst of every way in each round. A collective call.

    Args:
        ways: what to time; the same names in the same order on all ranks.
        group: the ranks that make the calls together.
        device: where the calls run.
        most: rounds at most; at least one is done.
        count: timed calls in a burst.
        around: opened around each burst of the way it is given.
        barrier: instead of ``group``'s own; what it does last happens right before the burst.
        go_on: whether to begin one more round; the same answer on all ranks.
    """
    found: dict[str, list[Burst]] = {name: [] for name in ways}
    for turn in range(most):
        if turn and not go_on():
            break
        order = list(ways)
        random.Random(turn).shuffle(order)  # noqa: S311 - the same order on all ranks, another every round
        for name in order:
            with around(name):
                ready = barrier or (lambda: dist.barrier(group=group))
                found[name].append(own_burst(ways[name], count, device, ready))
    ms = _slowest([[astuple(one) for one in bursts] for bursts in found.values()], group, device)
    return {name: Samples(*by_clock) for name, by_clock in zip(found, ms.transpose(1, 2).tolist(), strict=True)}


def sustained(
    ways: Mapping[str, Way], ms: Mapping[str, float], group: dist.ProcessGroup, device: torch.device
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


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def burst(call: Way, count: int, group: dist.ProcessGroup, device: torch.device, warm: int = 1) -> float:
    """Milliseconds of one of ``count`` back-to-back calls behind ``warm`` others, on the slowest rank."""
    mine = own_burst(call, count, device, lambda: dist.barrier(group=group), warm)
    return _slowest(mine.ms, group, device).item()


def _slowest(mine: Any, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    slowest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest


def own_burst(
    call: Way,
    count: int,
    device: torch.device,
    barrier: Callable[[], object],
    warm: int = 1,
    meanwhile: Callable[[], object] | None = None,
) -> Burst:
    """A burst as this rank times it; ``meanwhile`` is called while the GPU is at it."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
    barrier()
    began = time.perf_counter()
    for _ in range(warm):
        finish(call())
    first = (time.perf_counter() - began) * 1e3 / max(warm, 1)
    if on_gpu:
        start.record()
    began = time.perf_counter()
    for _ in range(count):
        finish(call())
    host = (time.perf_counter() - began) * 1e3 / count
    if not on_gpu:
        return Burst(host, host, first)
    end.record()
    if meanwhile is not None:
        meanwhile()
    end.synchronize()
    return Burst(start.elapsed_time(end) / count, host, first)


def finish(result: Any) -> None:
    """Wait for what an asynchronous call has begun."""
    if isinstance(result, Pending):
        result.wait()
