"""Time the operators' calls of every n-th step, and compare them with their GEMMs alone.

Names, units and meanings are those of docs/metrics.md, of this rank. :mod:`ops.call_events` defines the time of a call.

Baselines are the GEMM alone, and collective then GEMM (the ``reference`` backend): a short burst of each after each of
the first :data:`ROUNDS` samples that have the call, while the GPU is as warm and its clock as low as training has made
them. Even so the clock is not the step's. Where that could be much of what the collective takes, the comparison is
withheld. Operands are random, since zeros make a GEMM draw less power and run faster; their generator leaves training's
random numbers as they are. ``all_gather`` has no GEMM: its ``gemm_ms`` is 0.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.metrics.summary import median, overlap_efficiency
from megatron_flux.ops import call_events, timing
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.backends.tuned import TunedBackend
from megatron_flux.ops.call import GATHERING, OperatorCall
from megatron_flux.ops.call_events import Call, CallTimer, GradientReduction, Times
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.fp8_operand import random_pair
from megatron_flux.ops.gemm import gemm_only
from megatron_flux.ops.tuner.keys import describe
from megatron_flux.ops.tuner.tuner import Tuner

_SUMS = {
    "flux/operator_time_ms": "time_ms",
    "flux/gemm_time_ms": "gemm_ms",
    "flux/serial_time_ms": "serial_ms",
    "flux/exposed_communication_ms": "exposed_ms",
}
"""Fields by operator, and of what they are sums over its calls."""
FIELDS = (*_SUMS, "flux/e_overlap", "flux/calls")

NO_OVERLAP = "no GPU: a processor's times say nothing of overlap on one"
NO_CLOCK = "the GPU's clock is not known, so GEMM alone and step may have run at different ones"
OTHER_CLOCK = "the GEMM alone ran at another clock than the step"
FASTER = "the call took less than the GEMM alone, which must have run in another state"
"""Why a comparison is withheld."""

TOLERANCE = 0.1  # share of the hideable time that may be due to clocks
RESOLUTION = 0.005  # relative difference of two clocks that NVML shows as one: half its step of 15 MHz at 1500
ROUNDS = 5  # measurements of every call's baselines, one after each sample
BURST_MS, MOST_CALLS = 2.0, 20  # length of a burst, and its maximum of calls


class Sampler:
    """Times the calls of one step out of ``interval``, and reads this rank's GPU once in it."""

    def __init__(self, interval: int, *, operators: bool = True, gpu: nvml.Gpu | None = None) -> None:
        """``interval`` 0: never. Without ``operators`` calls are not timed and every field of a sample is null.

        That is for CUDA graphs: the few calls that they do not replay would pass for all.
        """
        self._interval = interval
        self.reading: nvml.Reading | None = None
        """``gpu`` in the latest step; None unless that was sampled and lasted long enough."""
        self.reduction_ms: float | None = None
        """Time of the gradient reduction in the latest sampled step; None if calls are not timed."""
        self._operators, self._gpu, self._seconds = operators, gpu, 0.0
        self._timer = CallTimer()
        self._rounds: dict[Call, list[Baseline]] = defaultdict(list)
        self._sampling = False

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Run one step inside, ``iteration`` from 1; each lasts about as long as the one before."""
        self._sampling, self.reading = self._interval > 0 and iteration % self._interval == 0, None
        glance = nvml.Glance(self._gpu, self._seconds / 2) if self._sampling and self._gpu is not None else None
        began = time.perf_counter()
        try:
            with call_events.timed_by(self._timer if self._sampling and self._operators else None):
                yield
        finally:
            self._seconds = time.perf_counter() - began
            self.reading = glance.result() if glance is not None else None

    def result(self) -> dict[str, Any] | None:
        """Return the sample of the latest step, right after it. Collective at the first samples that have a call."""
        if not self._sampling:
            return None
        self._sampling = False
        if not self._operators:
            return dict.fromkeys(FIELDS)
        collected = self._timer.collect()
        times = {call: taken for call, taken in collected.items() if not isinstance(call, GradientReduction)}
        self.reduction_ms = sum(taken.milliseconds for call, taken in collected.items() if call not in times)
        # One order for all ranks: two that are in two groups together must not measure them crosswise.
        shape = attrgetter("operator", "m", "n", "k", "transposed", "backend", "wire", "group_name")
        for call in sorted(times, key=lambda call: (_numbers(call), *shape(call))):
            rounds = self._rounds[call]
            if len(rounds) < ROUNDS and NO_MEMORY not in rounds:
                rounds.append(_measure(call, self._gpu, len(rounds) % 2 == 1))
        clock = None if self.reading is None else self.reading.sm_clock_mhz
        return overlap(times, {call: _medians(self._rounds[call]) for call in times}, clock)


def _numbers(call: Call) -> str:
    return str(call.dtype).removeprefix("torch.") if call.fp8 is None else call.fp8.words()


class Baseline(NamedTuple):
    """Times of one call without flux, of one round or as medians; None if not known."""

    gemm_ms: float | None
    serial_ms: float | None
    source: str  # ``measured``, or why there is none
    sm_clock_mhz: float | None = None  # this rank's GPU while the GEMM ran


NO_MEMORY = Baseline(None, None, "not measured: no memory for the operands on some rank")


def _medians(rounds: list[Baseline]) -> Baseline:
    if NO_MEMORY in rounds:
        return NO_MEMORY
    gemm, serial, _, clocks = zip(*rounds, strict=True)
    return Baseline(median(gemm), median(serial), "measured", median(clocks))


def overlap(times: Mapping[Call, Times], baselines: Mapping[Call, Baseline], clock: float | None) -> dict[str, Any]:
    """Return ``flux/*`` of sampled calls; ``clock``: MHz of this rank's GPU in the step, None if not known.

    A sum by operator is null if a call's GEMM was not measured, or its comparison is withheld.
    """
    rows = [_row(call, times[call], baselines[call], clock) for call in sorted(times, key=str)]
    by_operator: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_operator[row["operator"]].append(row)

    def total(group: list[dict[str, Any]], key: str) -> float | None:
        return None if any(row[key] is None for row in group) else sum(row[key] * row["calls"] for row in group)

    sums = {field: {name: total(of, key) for name, of in by_operator.items()} for field, key in _SUMS.items()}
    _, gemm, serial, exposed = sums.values()
    e_overlap = {name: _efficiency(exposed[name], gemm[name], serial[name]) for name in by_operator}
    return {**sums, "flux/e_overlap": e_overlap, "flux/calls": rows}


def _efficiency(exposed: float | None, gemm: float | None, serial: float | None) -> float | None:
    return overlap_efficiency(None if exposed is None or gemm is None else gemm + exposed, gemm, serial)


def _withheld(taken: float, baseline: Baseline, clock: float | None, *, on_gpu: bool) -> str | None:
    """Return why a call that took ``taken`` ms cannot be compared with its GEMM; None if it can (or has none).

    A GEMM's time goes with the clock. The difference says nothing if the clocks of step and measurement may change it
    by more than :data:`TOLERANCE` of the time that could be hidden, or if a call beats its GEMM by more than that.
    """
    if not on_gpu:
        return NO_OVERLAP
    if baseline.serial_ms is None or not baseline.gemm_ms:
        return None
    allowed = TOLERANCE * max(baseline.serial_ms - baseline.gemm_ms, 0.0)
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
        **{name: getattr(call, name) for name in ("operator", "m", "n", "k")},
        "dtype": _numbers(call),
        "transposed": call.transposed,
        "tp": call.group.size(),
        "backend": _backend(call),
        "calls": calls,
        "time_ms": taken,
        **baseline._asdict(),
        "exposed_ms": exposed,
        "e_overlap": _efficiency(exposed, baseline.gemm_ms, baseline.serial_ms),
        "withheld": why,
    }


def _backend(call: Call) -> str:
    """Return the call's backend, with the tuner's plan; the tuner leaves plain gathers to the copy engine."""
    if call.backend != TunedBackend.name or call.operator == "all_gather":
        return call.backend
    entries = _tuner().decisions(call.group).entries
    captured = capturing(torch.empty(0, device=call.device))
    shape = call.m, call.n, call.k, _numbers(call), call.transposed
    for operator in (call.operator, f"{call.operator} beside wgrad"):
        key = describe(operator, *shape, call.group, call.wire, call.device, captured=captured)
        if key in entries:
            return f"{call.backend}: {entries[key].label}"
    return call.backend


def choices() -> dict[str, dict[str, Any]]:
    """Return the tuner's plans in this process, by call (its key up to the bar, without device and versions)."""
    shown = ("backend", "plan", "pieces", "ms", "run")
    return {
        key.partition(" | ")[0]: {name: value for name, value in entry.to_json().items() if name in shown}
        for key, entry in _tuner().entries()
    }


def _tuner() -> Tuner:
    backend = get_backend(TunedBackend.name)
    assert isinstance(backend, TunedBackend)  # noqa: S101 - registered under that name by the package itself
    return backend.tuner


def _measure(call: Call, gpu: nvml.Gpu | None, gemm_first: bool) -> Baseline:
    """Measure one round of ``call`` on random operands of its shape. Collective over its group."""
    group, reference = call.group, ReferenceBackend()
    operands = _operands(call)
    if not timing.all_agree(operands is not None, group, "room to sample") or operands is None:
        return NO_MEMORY
    made, alone = operands
    stock = partial(reference.plan(made).run, made)
    # The slowest rank's, so that all ranks make as many calls.
    once = timing.burst(stock, 1, group, call.device)
    count = max(1, min(MOST_CALLS, int(BURST_MS / max(once, 1e-3))))
    barrier = partial(dist.barrier, group=group)

    def burst(way: Callable[[], Any]) -> tuple[float, float | None]:
        seen: list[nvml.Reading] = []
        look = None if gpu is None else lambda: seen.append(gpu.read())
        ms, *_ = timing.own_burst(way, count, call.device, barrier, meanwhile=look)
        return ms, seen[0].sm_clock_mhz if seen else None

    ways: dict[str, Callable[[], Any]] = {"serial": stock, "gemm": alone}
    if call.operator == "all_gather":
        del ways["gemm"]
    taken = {name: burst(ways[name]) for name in (reversed(ways) if gemm_first else ways)}
    serial, clock = taken["serial"]
    gemm, clock = taken.get("gemm", (0.0, clock))
    return Baseline(gemm, serial, "measured", clock)


def _operands(call: Call) -> tuple[OperatorCall, Callable[[], Any]] | None:
    """Allocate all that measuring needs: the call on operands, and its GEMM alone; None if memory is short."""
    rows = call.m // call.group.size() if call.operator in GATHERING else call.m
    generator = torch.Generator(device=call.device).manual_seed(call.group.rank())
    random = partial(torch.randn, generator=generator, device=call.device, dtype=call.dtype)
    try:
        pair = call.fp8 and random_pair(rows, call.n, call.k, call.fp8, call.device, generator)
        if pair is None:
            x, weight = random(rows, call.k), random(*((call.k, call.n) if call.transposed else (call.n, call.k)))
        else:
            x, weight = pair.x.numbers, pair.weight.numbers
        made = OperatorCall(call.operator, x, weight, call.group, call.transposed, fp8=pair)
        alone = gemm_only(made)
        # The reference backend's gathered operand, its result and the one before, which is dropped later.
        scratch = x.new_empty(call.m, call.k), x.new_empty(2, call.m, call.n, dtype=made.out)
        del scratch
    except torch.OutOfMemoryError:
        return None
    return None if alone is None else (made, alone)
