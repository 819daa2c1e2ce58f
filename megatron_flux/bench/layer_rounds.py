"""The interleaved rounds of ``bench layer``: :func:`megatron_flux.ops.timing.rounds`, and what is watched besides.

Each arm runs in its own context (patched or not). Python's garbage collector runs between arms, not inside them. From
the second round on each rank looks at its GPU's clock in the middle of a burst: arms that move data while they multiply
may be held at lower clocks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.bench.collectives import Collectives
from megatron_flux.ops import timing

Runnable = tuple[Callable[[], object], Callable[[], AbstractContextManager[None]]]
"""A step, and the context it runs in."""


@dataclass
class Samples:
    """Of one arm, one entry per round."""

    step_ms: list[float]
    """Milliseconds per step, of the slowest rank."""
    host_ms: list[float]
    """Milliseconds to enqueue one step on an idle GPU, of the slowest rank."""
    sm_clock_mhz: list[float | None]
    """Of the slowest GPU in the middle of the burst, None where none told."""
    throttle_reasons: list[list[str]]
    """What held any GPU's clock down at that moment, as :func:`megatron_flux.nvml.throttle_reasons` names it."""


def interleave(
    arms: Mapping[str, Runnable],
    group: dist.ProcessGroup,
    collectives: Collectives,
    device: torch.device,
    *,
    rounds: int,
    burst: int,
    deadline: float | None = None,
    gpu: nvml.Gpu | None = None,
) -> dict[str, Samples]:
    """Time every arm ``rounds`` times.

    Args:
        arms: what to run, by name; the same on all ranks.
        group: the ranks, which are those of ``collectives``.
        collectives: for what they decide alike.
        device: where the steps run.
        rounds: rounds at most; at least one is done.
        burst: back-to-back steps per arm and round.
        deadline: no round begins after this ``time.monotonic()`` of the first rank.
        gpu: this rank's, for its clock; None looks at nothing.

    Returns:
        The samples of every arm, the same on all ranks.
    """
    seen: dict[str, list[nvml.Reading | None]] = {name: [] for name in arms}
    half: dict[str, float] = {}
    """Of an arm's last burst, in seconds."""
    glances: list[nvml.Glance] = []
    delay: float | None = None
    began = 0.0

    def barrier() -> None:
        nonlocal began
        collectives.barrier()
        if gpu is not None and delay is not None:
            glances.append(nvml.Glance(gpu, delay))
        began = time.perf_counter()

    @contextmanager
    def around(name: str) -> Iterator[None]:
        nonlocal delay
        delay = half.get(name)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with arms[name][1]():
                yield
                half[name] = (time.perf_counter() - began) / 2
                seen[name].append(glances.pop().result() if glances else None)
        finally:
            if collecting:
                gc.enable()

    found = timing.rounds(
        {name: step for name, (step, _) in arms.items()},
        group,
        device,
        rounds,
        burst,
        around=around,
        barrier=barrier,
        go_on=lambda: not collectives.decided(deadline is not None and time.monotonic() > deadline),
    )
    ranks = collectives.all(seen)
    return {
        name: Samples(one.ms, one.first_host_ms, *_clocks([readings[name] for readings in ranks]))
        for name, one in found.items()
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
