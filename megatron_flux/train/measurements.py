"""What is measured of a step on every rank, brought together in one small all-gather behind it.

    with measurements.step(iteration):
        local = trainer.step()
    result = gathered(local, measurements.values(local), device)
    record |= measurements.fields(result)

Every step: loss of the last stage, the slowest time, the largest memory, layers of other stages. Every
``sample_interval`` steps also operators, GPUs and how the ranks differ: every operator call is timed on the device
(:mod:`megatron_flux.telemetry.call_sampler`), and each rank looks at its GPU once, in the middle of the step. A step
that is not sampled costs a comparison or two. Names, units and meanings: :mod:`megatron_flux.metrics.schema`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.comm import timeouts
from megatron_flux.comm.collectives import all_gather
from megatron_flux.telemetry import call_sampler
from megatron_flux.train.trainer import LocalStep

REPLAYED = "none: calls inside replayed CUDA graphs are not seen by the host"
"""Where operator counts and times come from."""

_PER_RANK = ("operators_ms", *nvml.FIELDS, "throttle")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did; the same on every rank."""

    loss: float
    """Mean loss over the tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    lr: float
    seconds: float
    """Wall time of the slowest rank, from reading the first batch to the end of the optimizer's step."""
    ranks: dict[str, list[float | None]]
    """By name, one value per rank: ``seconds``, and what else the ranks gave."""


def gathered(local: LocalStep, values: Mapping[str, float | None], device: torch.device) -> StepResult:
    """Bring together ``local`` and ``values`` (the same names on all ranks; None is "not known") of all ranks."""
    mine = [local.loss_sum, local.loss_tokens, local.seconds, *values.values()]
    row = torch.tensor([[math.nan if v is None else v for v in mine]], dtype=torch.float64, device=device)
    table = all_gather(row, dist.group.WORLD).wait().tolist()
    sums, tokens, *columns = zip(*table, strict=True)
    names = ["seconds", *values]
    return StepResult(
        # Diverged where it is NaN: a rank without a loss has 0 here, never NaN.
        loss=sum(sums) / sum(tokens),
        grad_norm=local.grad_norm,
        lr=local.lr,
        seconds=max(columns[0]),
        ranks={n: [None if math.isnan(v) else v for v in column] for n, column in zip(names, columns, strict=True)},
    )


def known(values: list[float | None]) -> list[float]:
    """The values that are known."""
    return [value for value in values if value is not None]


class StepMeasurements:
    """Measures beside one arm's steps on this rank."""

    def __init__(self, interval: int, device: torch.device, *, flux: bool, replayed: bool = False) -> None:
        """``interval``: steps between samples, 0 is never; ``flux``: the arm runs patched; ``replayed``: its operator
        calls are in CUDA graphs.
        """
        self._flux = flux
        self.operator_source = REPLAYED if replayed else "events around the host's calls"
        self.gpu_source = "none: nothing is sampled"
        self._sampler = call_sampler.Sampler(interval, operators=not replayed)
        self._gpu: nvml.Gpu | None = None
        if interval:
            try:
                self._gpu = nvml.of_device(device)
                self.gpu_source = nvml.source()
            except LookupError as error:
                self.gpu_source = f"none: {error}"
        self._last_seconds = 0.0
        self._reading: nvml.Reading | None = None
        self._sampled: dict[str, Any] | None = None
        self._choices: int | None = None

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
        fields = {"flux/sampled": self._sampled is not None, "flux/wait_timeouts": timeouts.timeouts()}
        # What the tuner chose, where that was not recorded yet.
        if self._flux and self._choices != (made := call_sampler.choices_made()):
            self._choices = made
            fields["flux/choices"] = call_sampler.choices()
        if self._sampled is not None:
            fields |= self._sampled | across_ranks(result) | over_gpus(result)
        return fields


def across_ranks(result: StepResult) -> dict[str, Any]:
    """How the ranks of a sampled step differ. Without operator times it is not known which rank waited for which."""
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
    """Clocks, power and temperature over the ranks' GPUs, and how many were throttled by what; None where not known."""
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
