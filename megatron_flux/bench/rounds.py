"""Timing arms against each other: interleaved rounds in random order, GPU time and host time of the slowest rank.

One round times every arm once. Per arm: all ranks meet with idle GPUs; one step is enqueued and its host time taken
(nothing waits for the GPU, so it is the time Python and the driver need to enqueue a step); behind it, while the GPU
is still busy with it, ``burst`` steps are enqueued between two events, so that neither the start nor an empty queue is
in the time. Python's garbage collector runs between arms, not inside them.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from megatron_flux.bench.together import Together

Runnable = tuple[Callable[[], object], Callable[[], AbstractContextManager[None]]]
"""A step, and the context it runs in."""


@dataclass
class Samples:
    """Milliseconds per step of one arm, one number per round, of the slowest rank."""

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def interleave(
    arms: Mapping[str, Runnable],
    together: Together,
    device: torch.device,
    *,
    rounds: int,
    burst: int,
    deadline: float | None = None,
    seed: int = 0,
) -> dict[str, Samples]:
    """Time every arm ``rounds`` times.

    Args:
        arms: what to run, by name; the same on all ranks.
        together: the ranks.
        device: where the steps run.
        rounds: rounds at most; at least one is done.
        burst: back-to-back steps per arm and round.
        deadline: no round begins after this ``time.monotonic()`` of the first rank.
        seed: decides the order of the arms in every round.

    Returns:
        The samples of every arm, the same on all ranks.
    """
    order = random.Random(seed)  # noqa: S311 - the same order on all ranks
    steps: dict[str, list[float]] = {name: [] for name in arms}
    hosts: dict[str, list[float]] = {name: [] for name in arms}
    collecting = gc.isenabled()
    try:
        for turn in range(rounds):
            late = deadline is not None and time.monotonic() > deadline
            if turn and together.decided(late):
                break
            for name in order.sample(list(arms), len(arms)):
                step, active = arms[name]
                gc.collect()
                gc.disable()
                with active():
                    host, spent = _once(step, together, device, burst)
                if collecting:
                    gc.enable()
                steps[name].append(spent)
                hosts[name].append(host)
    finally:
        if collecting:
            gc.enable()
    slow_steps, slow_hosts = together.slowest(list(steps.values())), together.slowest(list(hosts.values()))
    return {name: Samples(s, h) for name, s, h in zip(arms, slow_steps, slow_hosts, strict=True)}


def _once(step: Callable[[], object], together: Together, device: torch.device, burst: int) -> tuple[float, float]:
    """Host milliseconds of one step, and milliseconds per step of a burst."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    together.barrier()
    began = time.perf_counter()
    step()
    host = (time.perf_counter() - began) * 1e3
    if not on_gpu:
        began = time.perf_counter()
        for _ in range(burst):
            step()
        return host, (time.perf_counter() - began) * 1e3 / burst
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(burst):
        step()
    end.record()
    torch.cuda.synchronize(device)
    return host, start.elapsed_time(end) / burst
