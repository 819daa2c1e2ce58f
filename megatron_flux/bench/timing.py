"""Timing methods against each other on all ranks at once.

The GPUs of one host throttle together and clocks drift within a minute, so methods are interleaved: every round times
one burst of each. What is reported is the slowest rank of each round, and over rounds the median with its quartiles.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over the rounds, of the slowest rank in each."""

    median: float
    low: float
    high: float
    host_us: float | None = None
    """Microseconds to enqueue one call while the GPU is busy with those before, median likewise."""


def interleaved(
    methods: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    *,
    rounds: int = 9,
    burst: int = 8,
    warmup: int = 3,
) -> dict[str, Timing]:
    """Time every method in turn, ``rounds`` times, ``burst`` back-to-back calls each."""
    for method in methods.values():
        for _ in range(warmup):
            method()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in methods}
    hosts: dict[str, list[float]] = {name: [] for name in methods}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(rounds):
        order = list(methods.items())
        random.Random(turn).shuffle(order)  # noqa: S311 - the same order on all ranks, another every round
        for name, method in order:
            dist.barrier(group=group)
            torch.cuda.synchronize()
            method()
            start.record()
            began = time.perf_counter()
            for _ in range(burst):
                method()
            hosts[name].append((time.perf_counter() - began) * 1e6 / burst)
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) / burst)
    out = {}
    for name, values in found.items():
        slowest = torch.tensor([values, hosts[name]], device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        (low, _), (middle, host), (high, _) = torch.quantile(
            slowest, torch.tensor([0.25, 0.5, 0.75], device="cuda"), dim=1
        ).tolist()
        out[name] = Timing(median=middle, low=low, high=high, host_us=round(host, 1))
    return out
