"""Timing arms against each other: interleaved rounds in random order, GPU time and host time of the slowest rank.

One round times every arm once. Per arm: all ranks meet with idle GPUs; one step is enqueued and its host time taken
(nothing waits for the GPU, so it is the time Python and the driver need to enqueue a step); behind it, while the GPU
is still busy with it, ``burst`` steps are enqueued between two events, so that neither the start nor an empty queue is
in the time. Python's garbage collector runs between arms, not inside them.

From the second round on each rank looks at its GPU's clock in the middle of a burst: arms that move data while they
multiply may be held at lower clocks.
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

from megatron_flux import nvml
from megatron_flux.bench.together import Together

Runnable = tuple[Callable[[], object], Callable[[], AbstractContextManager[None]]]
"""A step, and the context it runs in."""


@dataclass
class Samples:
    """Milliseconds per step of one arm, one number per round, of the slowest rank."""

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    sm_clock_mhz: list[float | None] = field(default_factory=list)
    """Of the slowest GPU in the middle of the burst, None where none told."""
    throttle_reasons: list[list[str]] = field(default_factory=list)
    """What held any GPU's clock down at that moment, as :func:`megatron_flux.nvml.throttle_reasons` names it."""


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
    gpu: nvml.Gpu | None = None,
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
        gpu: this rank's, for its clock; None looks at nothing.

    Returns:
        The samples of every arm, the same on all ranks.
    """
    order = random.Random(seed)  # noqa: S311 - the same order on all ranks
    steps: dict[str, list[float]] = {name: [] for name in arms}
    hosts: dict[str, list[float]] = {name: [] for name in arms}
    seen: dict[str, list[nvml.Reading | None]] = {name: [] for name in arms}
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
                # In the middle of what the last round took: one step and the burst.
                delay = steps[name][-1] * (burst + 1) / 2e3 if steps[name] else None
                with active():
                    host, spent, reading = _once(step, together, device, burst, gpu, delay)
                if collecting:
                    gc.enable()
                steps[name].append(spent)
                hosts[name].append(host)
                seen[name].append(reading)
    finally:
        if collecting:
            gc.enable()
    slow_steps, slow_hosts = together.slowest(list(steps.values())), together.slowest(list(hosts.values()))
    ranks = together.all(seen)
    return {
        name: Samples(s, h, *_clocks([readings[name] for readings in ranks]))
        for name, s, h in zip(arms, slow_steps, slow_hosts, strict=True)
    }


def _clocks(ranks: list[list[nvml.Reading | None]]) -> tuple[list[float | None], list[list[str]]]:
    """Round by round: the lowest clock of all ranks, and what held any of them down."""
    clocks: list[float | None] = []
    reasons: list[list[str]] = []
    for readings in zip(*ranks, strict=True):
        known = [reading for reading in readings if reading is not None]
        told = [reading.sm_clock_mhz for reading in known if reading.sm_clock_mhz is not None]
        clocks.append(min(told, default=None))
        reasons.append(sorted({name for reading in known for name in nvml.throttle_reasons(reading.throttle)}))
    return clocks, reasons


def _once(
    step: Callable[[], object],
    together: Together,
    device: torch.device,
    burst: int,
    gpu: nvml.Gpu | None,
    delay: float | None,
) -> tuple[float, float, nvml.Reading | None]:
    """Host milliseconds of one step, milliseconds per step of a burst, and what was seen after ``delay`` seconds."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    together.barrier()
    glance = nvml.Glance(gpu, delay) if gpu is not None and delay is not None else None
    began = time.perf_counter()
    step()
    host = (time.perf_counter() - began) * 1e3
    if not on_gpu:
        began = time.perf_counter()
        for _ in range(burst):
            step()
        spent = (time.perf_counter() - began) * 1e3 / burst
        return host, spent, glance.result() if glance is not None else None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(burst):
        step()
    end.record()
    torch.cuda.synchronize(device)
    return host, start.elapsed_time(end) / burst, glance.result() if glance is not None else None
