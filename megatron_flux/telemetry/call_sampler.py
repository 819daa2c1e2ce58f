"""Every so many steps, what the operators' calls of one step took, and what that says about overlap.

    sampler = Sampler(interval)
    with sampler.step(iteration):
        ...                          # one training step
    values = sampler.result(clock)   # None unless that step was sampled; the GPU's clock in it, in MHz, if known

The values have the names, units and meanings of :mod:`megatron_flux.metrics.schema`. They are of this rank.
:mod:`ops.call_events` says what exactly is timed, :mod:`telemetry.baseline_times` what it is compared with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_flux.ops import call_events
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call_events import Call, CallTimer, Times
from megatron_flux.ops.kernel_config import label_of
from megatron_flux.telemetry.baseline_times import Baseline, BaselineTimes

FIELDS = (
    "flux/operator_time_ms",
    "flux/gemm_time_ms",
    "flux/serial_time_ms",
    "flux/exposed_communication_ms",
    "flux/e_overlap",
    "flux/calls",
)
"""What a sample holds."""

NO_CLOCK = "the GPU's clock is not known, so GEMM alone and step may have run at different ones"
OTHER_CLOCK = "the GEMM alone ran at another clock than the step"
FASTER = "the call took less than the GEMM alone, which must have run in another state"
"""Why a comparison is withheld."""

TOLERANCE = 0.1
"""How much of what could be hidden may be due to clocks."""
RESOLUTION = 0.005
"""Relative difference of two clocks that NVML shows as one: half its step of 15 MHz at 1500."""


class Sampler:
    """Times the calls of one step out of ``interval``."""

    def __init__(self, interval: int, *, operators: bool = True) -> None:
        """``interval`` 0 is never. Without ``operators`` their calls are not timed and every field of a sample is null:
        where CUDA graphs replay calls, those few that they do not would pass for all.
        """
        self.interval = interval
        self._operators = operators
        self._timer = CallTimer()
        self._baselines = BaselineTimes()
        self._sampling = False

    def due(self, iteration: int) -> bool:
        """Whether ``iteration`` (from 1) is one that is sampled."""
        return self.interval > 0 and iteration % self.interval == 0

    def step(self, iteration: int) -> AbstractContextManager[None]:
        """The context of one step."""
        self._sampling = self.due(iteration)
        return call_events.timed_by(self._timer if self._sampling and self._operators else None)

    def result(self, clock: float | None = None) -> dict[str, Any] | None:
        """What was sampled in the latest step; call it right behind the step, while the GPU is as the step has left it.

        Collective over the operators' groups at the first samples that have a call. ``clock``: MHz of this rank's GPU
        in the step, None where that is not known.
        """
        if not self._sampling:
            return None
        self._sampling = False
        if not self._operators:
            return dict.fromkeys(FIELDS)
        times = self._timer.collect()
        return overlap(times, self._baselines.of(times), clock)


def overlap(times: Mapping[Call, Times], baselines: Mapping[Call, Baseline], clock: float | None) -> dict[str, Any]:
    """``flux/*`` of sampled calls; ``clock`` as for :meth:`Sampler.result`.

    Sums by operator leave out what is not known: an operator with a call whose GEMM was not measured has a time, and
    null elsewhere; one with a call whose comparison is withheld has no exposed time and no efficiency.
    """
    rows = [_row(call, times[call], baselines[call], clock) for call in sorted(times, key=str)]
    by_operator: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_operator[row["operator"]].append(row)

    def sums(key: str) -> dict[str, float | None]:
        return {
            operator: None if any(row[key] is None for row in group) else sum(row[key] * row["calls"] for row in group)
            for operator, group in by_operator.items()
        }

    taken, gemm, serial, exposed = (sums(key) for key in ("time_ms", "gemm_ms", "serial_ms", "exposed_ms"))
    e_overlap = {name: _efficiency(exposed[name], gemm[name], serial[name]) for name in by_operator}
    return dict(zip(FIELDS, (taken, gemm, serial, exposed, e_overlap, rows), strict=True))


def _efficiency(exposed: float | None, gemm: float | None, serial: float | None) -> float | None:
    """E_overlap, None where a time is not known or the collective took no time to be hidden."""
    if exposed is None or gemm is None or serial is None or serial <= gemm:
        return None
    return 1 - exposed / (serial - gemm)


def _withheld(taken: float, baseline: Baseline, clock: float | None, *, on_gpu: bool) -> str | None:
    """Why a call that took ``taken`` ms cannot be compared with its GEMM, or None if it can (or has none).

    A GEMM's time goes with the clock. Where the clocks of step and measurement are so far apart that the GEMM's time
    may be off by more than :data:`TOLERANCE` of the time that could be hidden, the difference says nothing; nor does
    it where a call is faster than its GEMM by more than that.
    """
    if baseline.serial_ms is None or not baseline.gemm_ms:
        return None
    allowed = TOLERANCE * max(baseline.serial_ms - baseline.gemm_ms, 0.0)
    if on_gpu:
        if clock is None or baseline.sm_clock_mhz is None:
            return NO_CLOCK
        apart = max(abs(clock / baseline.sm_clock_mhz - 1), RESOLUTION)
        if apart * baseline.gemm_ms > allowed:
            return OTHER_CLOCK
    return FASTER if taken < baseline.gemm_ms - allowed else None


def _row(call: Call, times: Times, baseline: Baseline, clock: float | None) -> dict[str, Any]:
    # Only waits of calls that began before the sample: nothing to divide by.
    calls = max(times.calls, 1)
    taken = times.milliseconds / calls
    why = _withheld(taken, baseline, clock, on_gpu=call.device.type == "cuda")
    # Within the tolerance a call that was faster than its GEMM has hidden all; it has not gained time.
    exposed = None if baseline.gemm_ms is None or why is not None else max(taken - baseline.gemm_ms, 0.0)
    return {
        "operator": call.operator,
        "m": call.m,
        "n": call.n,
        "k": call.k,
        "dtype": str(call.dtype).removeprefix("torch."),
        "transposed": call.transposed,
        "tp": call.group.size(),
        "backend": _backend(call),
        "calls": calls,
        "time_ms": taken,
        "gemm_ms": baseline.gemm_ms,
        "serial_ms": baseline.serial_ms,
        "exposed_ms": exposed,
        "e_overlap": _efficiency(exposed, baseline.gemm_ms, baseline.serial_ms),
        "source": baseline.source,
        "sm_clock_mhz": baseline.sm_clock_mhz,
        "withheld": why,
    }


def _backend(call: Call) -> str:
    """The call's backend, and what the tuner chose for it; the tuner leaves plain gathers to the copy engine."""
    if call.backend != TunedBackend.name or call.operator == "all_gather":
        return call.backend
    like = torch.empty(0, dtype=call.dtype, device=call.device)
    answer = _tuner().answer(call.operator, call.m, call.n, call.k, like, call.transposed, call.group)
    if answer is None:
        return call.backend
    chosen = answer["backend"] if answer["plan"] is None else f"fused {label_of(answer['plan'])}"
    return f"{call.backend}: {chosen}"


def choices() -> dict[str, dict[str, Any]]:
    """What the tuner has chosen in this process, by call (its key up to the bar, without device and versions)."""
    return {
        key.partition(" | ")[0]: {name: answer[name] for name in ("backend", "plan", "ms")}
        for key, answer in _tuner().all_answers()
    }


def choices_made() -> int:
    """How many there are."""
    return len(_tuner().all_answers())


def _tuner() -> TunedBackend:
    backend = get_backend(TunedBackend.name)
    assert isinstance(backend, TunedBackend)  # noqa: S101 - registered under that name by the package itself
    return backend
