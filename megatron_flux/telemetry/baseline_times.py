"""What a call's GEMM takes by itself, and what collective and GEMM take in turn: the two ends of overlap efficiency.

FLUX (arXiv 2406.06858, section 5.1) defines the effective communication time of a way to run a call as its time minus
that of the unsplit GEMM, and overlap efficiency as

    E_overlap = 1 - ECT(overlapped) / ECT(not overlapped) = (serial - overlapped) / (serial - GEMM)

with ``serial`` the collective and the GEMM one after the other: here the ``reference`` backend.

Both times are this rank's, measured here, between steps: right behind a sampled step, while the GPU is as warm and its
clock as low as training has made them, a short burst of each at every one of the first :data:`ROUNDS` samples that
have the call. (The tuner's times would not do: its bursts of one GEMM run at the power limit, while a step with other
work in between clocks higher, so that calls would seem to beat their GEMM.) The clock is read meanwhile, since even
so it is not the step's: a GEMM takes longer by as much as the clock is lower, and where that could be much of what the
collective takes, no efficiency is given (:mod:`megatron_flux.telemetry.call_sampler`).

Operands are random, since zeros make a GEMM draw less power and run faster, and come from a generator of their own:
training's random numbers stay what they were. ``all_gather`` has no GEMM: its ``gemm_ms`` is 0.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.ops import timing
from megatron_flux.ops.backends.reference import ReferenceBackend, gemm_only
from megatron_flux.ops.call_events import Call
from megatron_flux.ops.checks import OperatorCall

ROUNDS = 5
"""Of every call; on GPUs one at each sample."""
BURST_MS, MOST_CALLS = 2.0, 20
"""Of one burst: about how long, and how many calls at most."""


NO_MEMORY = "not measured: no memory for the operands on some rank"


@dataclass(frozen=True)
class Baseline:
    """Of one call, medians over the rounds; None where they are not known."""

    gemm_ms: float | None
    serial_ms: float | None
    source: str
    """``measured``, or why there is none."""
    sm_clock_mhz: float | None = None
    """Of this rank's GPU while the GEMM ran; None where it is not known."""


@dataclass
class _Rounds:
    """What has been measured of one call, a number per round."""

    gemm_ms: list[float] = field(default_factory=list)
    serial_ms: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    failed: bool = False

    def wanted(self) -> bool:
        return not self.failed and len(self.serial_ms) < ROUNDS

    def baseline(self) -> Baseline:
        if self.failed:
            return Baseline(None, None, NO_MEMORY)
        clock = statistics.median(self.clocks) if self.clocks else None
        return Baseline(statistics.median(self.gemm_ms), statistics.median(self.serial_ms), "measured", clock)


def rounds_at_once(device: torch.device) -> int:
    """Rounds at one sample. A GPU would be in another state after many; a processor has none that lasts."""
    return 1 if device.type == "cuda" else ROUNDS


class BaselineTimes:
    """The times of the calls seen so far; each gets its rounds at the first samples that have it."""

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self._known: dict[Call, _Rounds] = {}
        self._gpus: dict[torch.device, nvml.Gpu | None] = {}

    def of(self, calls: Iterable[Call]) -> dict[Call, Baseline]:
        """The times of ``calls``. Collective over the calls' groups while one of them lacks rounds on their ranks."""
        calls = list(calls)
        # One order for all ranks: two that are in two groups together must not measure them crosswise.
        for call in sorted(calls, key=_same_on_all_ranks):
            rounds = self._known.setdefault(call, _Rounds())
            for _ in range(rounds_at_once(call.device)):
                if rounds.wanted():
                    measure(call, rounds, self._gpu(call.device))
        return {call: self._known[call].baseline() for call in calls}

    def _gpu(self, device: torch.device) -> nvml.Gpu | None:
        if device not in self._gpus:
            try:
                self._gpus[device] = nvml.of_device(device)
            except LookupError:
                self._gpus[device] = None
        return self._gpus[device]


def _same_on_all_ranks(call: Call) -> tuple[Any, ...]:
    return call.operator, call.m, call.n, call.k, str(call.dtype), call.transposed, call.backend, call.group_name


def measure(call: Call, rounds: _Rounds, gpu: nvml.Gpu | None) -> None:
    """Add a round of ``call`` on random operands of its shape. Collective over its group."""
    group, reference = call.group, ReferenceBackend()
    operands = _operands(call)
    if not timing.all_agree(operands is not None, group, call.device) or operands is None:
        rounds.failed = True
        return
    made, alone = operands
    # The slowest rank's, so that all ranks make as many calls.
    once = timing.burst(lambda: made.run(reference), 1, group, call.device)
    count = max(1, min(MOST_CALLS, int(BURST_MS / max(once, 1e-3))))
    ways: list[tuple[Callable[[], Any], list[float]]] = [
        (partial(made.run, reference), rounds.serial_ms),
        (alone, rounds.gemm_ms),
    ]
    if call.operator == "all_gather":
        ways.pop()
        rounds.gemm_ms.append(0.0)
    for way, times in ways if len(rounds.serial_ms) % 2 == 0 else reversed(ways):
        taken, clock = _burst(way, count, group, call.device, gpu)
        times.append(taken)
        if clock is not None and times is ways[-1][1]:
            rounds.clocks.append(clock)


def _burst(
    call: Callable[[], Any], count: int, group: dist.ProcessGroup, device: torch.device, gpu: nvml.Gpu | None
) -> tuple[float, float | None]:
    """Milliseconds on this rank of one of ``count`` calls behind another one, and the GPU's clock while they run."""
    if device.type != "cuda":
        dist.barrier(group=group)
        timing.finish(call())
        began = time.perf_counter()
        for _ in range(count):
            timing.finish(call())
        return (time.perf_counter() - began) * 1e3 / count, None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier(group=group)
    timing.finish(call())
    start.record()
    for _ in range(count):
        timing.finish(call())
    end.record()
    reading = gpu.read() if gpu is not None else None
    end.synchronize()
    return start.elapsed_time(end) / count, None if reading is None else reading.sm_clock_mhz


def _operands(call: Call) -> tuple[OperatorCall, Callable[[], Any]] | None:
    """The call on operands (a weight of nothing for all_gather), and its GEMM alone; None where memory is short.

    Everything that measuring will need is allocated once here, so that a rank finds out before others wait for it.
    """
    tp = call.group.size()
    rows = call.m if call.operator == "gemm_reduce_scatter" else call.m // tp
    generator = torch.Generator(device=call.device).manual_seed(call.group.rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=call.device, dtype=call.dtype)

    try:
        x = random(rows, call.k)
        weight = random(call.k, call.n) if call.transposed else random(call.n, call.k)
        made = OperatorCall(call.operator, x, weight, call.group, call.transposed)
        alone = gemm_only(made)
        # The reference backend's gathered operand, its result and the one before, which is dropped later.
        scratch = [x.new_empty(shape) for shape in ((call.m, call.k), (call.m, call.n), (call.m, call.n))]
        del scratch
    except torch.OutOfMemoryError:
        return None
    return None if alone is None else (made, alone)
