"""What is measured beside a step: operators, GPUs and how the ranks differ, every ``sample_interval`` steps.

    with telemetry.step(iteration):
        local = trainer.step()
    result = gathered(local, telemetry.values(local), device)
    record |= telemetry.fields(result)

A step that is not sampled costs a comparison or two. In a sampled one every operator call is timed on the device
(:mod:`telemetry.call_sampler`), and each rank looks at its GPU once, in the middle of the step. Names, units and
meanings are those of :mod:`megatron_flux.metrics.schema`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_flux import nvml
from megatron_flux.comm import timeouts as watch
from megatron_flux.telemetry import call_sampler as sampling
from megatron_flux.train.gather import StepResult, known
from megatron_flux.train.trainer import LocalStep

REPLAYED = "none: calls inside replayed CUDA graphs are not seen by the host"
"""Where operator counts and times come from."""

_PER_RANK = ("operators_ms", *nvml.FIELDS, "throttle")


class Telemetry:
    """Measures beside one arm's steps on this rank."""

    def __init__(self, interval: int, device: torch.device, *, flux: bool, replayed: bool = False) -> None:
        """``interval``: steps between samples, 0 is never; ``flux``: the arm runs patched; ``replayed``: its operator
        calls are in CUDA graphs.
        """
        self._flux = flux
        self.operator_source = REPLAYED if replayed else "events around the host's calls"
        self.gpu_source = "none: nothing is sampled"
        self._sampler = sampling.Sampler(interval, operators=not replayed)
        self._gpu: nvml.Gpu | None = None
        if interval:
            self._open_gpu(device)
        self._last_seconds = 0.0
        self._reading: nvml.Reading | None = None
        self._sampled: dict[str, Any] | None = None
        self._choices = 0
        self._started = False

    def _open_gpu(self, device: torch.device) -> None:
        try:
            self._gpu = nvml.of_device(device)
            self.gpu_source = nvml.source()
        except LookupError as error:
            self.gpu_source = f"none: {error}"

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Around one training step."""
        glance = None
        if self._gpu is not None and self._sampler.due(iteration):
            glance = nvml.Glance(self._gpu, self._last_seconds / 2)
        try:
            with self._sampler.step(iteration):
                yield
        finally:
            self._reading = glance.result() if glance is not None else None

    def values(self, local: LocalStep) -> dict[str, float | None]:
        """What this rank has to say of the step; collective at the first samples of an operator's shape."""
        self._last_seconds = local.seconds
        self._sampled = self._sampler.result(self._reading.sm_clock_mhz if self._reading is not None else None)
        values: dict[str, float | None] = dict.fromkeys(_PER_RANK)
        if self._sampled is not None and (taken := self._sampled["flux/operator_time_ms"]) is not None:
            values["operators_ms"] = sum(taken.values())
        if self._reading is not None:
            values |= {name: getattr(self._reading, name) for name in nvml.FIELDS}
            values["throttle"] = float(self._reading.throttle)
        return values

    def fields(self, result: StepResult) -> dict[str, Any]:
        """The fields of the record that are known of this step."""
        fields: dict[str, Any] = {
            "flux/sampled": self._sampled is not None,
            "flux/wait_timeouts": watch.timeouts(),
        }
        fields |= self._new_choices()
        if self._sampled is not None:
            fields |= self._sampled | across_ranks(result) | over_gpus(result)
        return fields

    def _new_choices(self) -> dict[str, Any]:
        """What the tuner chose, where that was not recorded yet."""
        if not self._flux or (self._started and self._choices == sampling.choices_made()):
            return {}
        self._started, self._choices = True, sampling.choices_made()
        return {"flux/choices": sampling.choices()}


def across_ranks(result: StepResult) -> dict[str, Any]:
    """How the ranks of a sampled step differ. Without operator times nobody knows who waited for whom."""
    ranks = result.ranks
    step_ms = [1e3 * (seconds or 0.0) for seconds in ranks["seconds"]]
    own = [
        step - operators
        for step, operators in zip(step_ms, ranks["operators_ms"], strict=True)
        if operators is not None
    ]
    names = ("operators_ms", "peak_memory_bytes", *nvml.FIELDS)
    return {
        "flux/slowest_rank": own.index(max(own)) if own else None,
        "flux/rank_spread_ms": max(own) - min(own) if own else None,
        "flux/ranks": {"step_ms": step_ms, **{name: ranks[name] for name in names if known(ranks[name])}},
    }


def over_gpus(result: StepResult) -> dict[str, Any]:
    """Clocks, power and temperature over the ranks' GPUs, and how many were held down by what; None where none told."""
    ranks = result.ranks
    if not known(ranks["throttle"]):
        return {"flux/gpu": None, "flux/throttle_reasons": None}
    clocks, memory, power, heat = (known(ranks[name]) for name in nvml.FIELDS)

    def mean(values: list[float]) -> float | None:
        return sum(values) / len(values) if values else None

    reasons: Counter[str] = Counter()
    for bits in known(ranks["throttle"]):
        reasons.update(nvml.throttle_reasons(int(bits)))
    return {
        "flux/gpu": {
            "sm_clock_mhz_min": min(clocks, default=None),
            "sm_clock_mhz_mean": mean(clocks),
            "memory_clock_mhz_min": min(memory, default=None),
            "power_w_mean": mean(power),
            "power_w_max": max(power, default=None),
            "temperature_c_max": max(heat, default=None),
        },
        "flux/throttle_reasons": dict(reasons),
    }
