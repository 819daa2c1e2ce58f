"""The timer of all benchmarks: ways to do one thing, timed against each other.

:func:`rounds` makes one burst of every way a round, in an order that changes every round, since the GPUs of one host
throttle together and clocks fall while a measurement lasts. A burst begins on idle GPUs behind a barrier. Calls ahead
of the timed ones keep the GPU busy, so that neither the start nor an empty queue is in the time. Every number is the
slowest rank's: device time between CUDA events, on the CPU the host's clock.

Functions with a group are collective calls: its ranks call them together, with the same names in the same order.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.host_link import HostLink
from megatron_flux.errors import OperatorError

Way = Callable[[], Any]


class Samples(NamedTuple):
    """Milliseconds of the slowest rank, one number per round."""

    ms: list[float]
    """Per timed call."""
    host_ms: list[float]
    """Host time to enqueue one of the timed calls, while the GPU is busy with earlier ones."""
    first_host_ms: list[float]
    """Host time to enqueue one of the calls ahead of them."""


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
    """Time a burst of ``count`` calls of every way in each round, of one to ``most``, while ``go_on()``, alike on all
    ranks. ``around`` is opened around each burst; ``barrier``, instead of the group's own, ends right before it.
    """
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(most if ways else 0):
        if number and not go_on():
            break
        order = list(ways)
        random.Random(number).shuffle(order)  # noqa: S311 - the same order on all ranks, another every round
        for name in order:
            with around(name):
                times[name].append(own_burst(ways[name], count, device, barrier or (lambda: dist.barrier(group=group))))
    ms = {name: _slowest(bursts, group, device) for name, bursts in times.items()}
    return {name: Samples(*by_round.t().tolist()) for name, by_round in ms.items()}


def all_agree(mine: bool, group: dist.ProcessGroup, about: str = "a decision") -> bool:
    """Return True if ``mine`` is true on every rank of ``group``. Collective."""
    return all(of_all_ranks(mine, group, about))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def burst(call: Way, count: int, group: dist.ProcessGroup, device: torch.device, warm: int = 1) -> float:
    """Return milliseconds of one of ``count`` back-to-back calls behind ``warm`` others, on the slowest rank."""
    own = own_burst(call, count, device, lambda: dist.barrier(group=group), warm)
    return _slowest(own, group, device)[0].item()


def gather_rate(link: HostLink, group: dist.ProcessGroup, nbytes: int) -> float:
    """Return the GB/s that a rank receives, the best of five gathers. Raises OperatorError: what arrives is wrong."""
    numbers = torch.arange(nbytes // 4, dtype=torch.int32, device=link.device)
    ranks = torch.arange(5 * link.tp, dtype=torch.int32, device=link.device).view(5, link.tp, 1) << 24
    mine, received, best = torch.empty_like(numbers), numbers.new_empty(link.tp, len(numbers)), 0.0

    def gather() -> None:
        link.gather("all_gather", mine, received, [0, nbytes]).wait()

    for turn in ranks:  # each with other numbers: what a slot still holds of the one before is noticed
        sent = numbers + turn
        mine.copy_(sent[link.rank])
        best = max(best, (link.tp - 1) * nbytes / burst(gather, 1, group, link.device, warm=0) / 1e6)
        received[link.rank] = mine
        if not torch.equal(received, sent):
            raise OperatorError(f"tp rank {link.rank} received through {link.through} what its peers have not sent")
    return best


def _slowest(own: Any, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    slowest = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest


def own_burst(
    call: Way,
    count: int,
    device: torch.device,
    barrier: Callable[[], object],
    warm: int = 1,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[float, float, float]:
    """Return the three numbers of :class:`Samples` of one burst on this rank; ``meanwhile`` is called while it runs."""
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
        return host, host, first
    end.record()
    if meanwhile is not None:
        meanwhile()
    end.synchronize()
    return start.elapsed_time(end) / count, host, first


def finish(result: Any) -> None:
    """Wait for what an asynchronous call has begun."""
    if isinstance(result, Pending):
        result.wait()
