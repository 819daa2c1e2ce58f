"""Measurements of a step on every rank, gathered in one small all-gather after it.

    with measurements.step(iteration):
        local = trainer.step()
    result = gathered(local, measurements.values(), device)
    record |= measurements.fields(result)

Every step: loss of the last stage, the slowest time, the largest memory, layers of other stages. Every
``sample_interval`` steps also operators, GPUs and how the ranks differ: every operator call is timed on the device
(:mod:`megatron_flux.telemetry.call_sampler`), and each rank looks at its GPU once, in the middle of the step. A step
that is not sampled costs a comparison or two. Names, units and meanings: docs/metrics.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.comm import timeouts
from megatron_flux.comm.collectives import all_gather
from megatron_flux.telemetry import call_sampler

_PER_RANK = ("host_memory_bytes", "operators_ms", "reduction_ms", *nvml.FIELDS, "throttle")


class LocalStep(NamedTuple):
    """Results of one step on this rank."""

    loss_sum: float  # over the tokens that this rank has the loss of: the last stage's first tensor-parallel rank alone
    loss_tokens: float
    grad_norm: float  # before clipping; the same on every rank
    lr: float
    seconds: float  # from reading the first batch to the end of the optimizer's step on an idle device


class StepResult(NamedTuple):
    """Results of one step; the same on every rank."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float
    lr: float
    seconds: float  # of the slowest rank
    ranks: dict[str, list[float | None]]  # one value per rank: of ``seconds``, and of what else the ranks gave


def gathered(local: LocalStep, values: Mapping[str, float | None], device: torch.device) -> StepResult:
    """Gather ``local`` and ``values`` (the same names on all ranks; None: unknown) from all ranks."""
    mine = [local.loss_sum, local.loss_tokens, local.seconds, *values.values()]
    row = torch.tensor([[math.nan if v is None else v for v in mine]], dtype=torch.float64, device=device)
    rows = all_gather(row, dist.distributed_c10d._get_default_group()).wait().tolist()
    sums, tokens, *columns = zip(*rows, strict=True)
    by_rank = [[None if math.isnan(value) else value for value in column] for column in columns]
    return StepResult(
        # Diverged where it is NaN: a rank without a loss has 0 here, never NaN.
        loss=sum(sums) / sum(tokens),
        grad_norm=local.grad_norm,
        lr=local.lr,
        seconds=max(columns[0]),
        ranks=dict(zip(["seconds", *values], by_rank, strict=True)),
    )


def known(values: list[float | None]) -> list[float]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


class StepMeasurements:
    """Measures a variant's steps on this rank, with ``interval`` steps between samples; 0 is never.

    ``flux``: it runs patched; ``replayed``: its operator calls are in CUDA graphs.
    """

    def __init__(self, interval: int, device: torch.device, *, flux: bool, replayed: bool = False) -> None:
        self._flux, self.replayed = flux, replayed
        unseen = "none: calls inside replayed CUDA graphs are not seen by the host"
        self.operator_source = unseen if replayed else "events around the host's calls"
        gpu, self.gpu_source = None, "none: nothing is sampled"
        if interval:
            try:
                gpu, self.gpu_source = nvml.of_device(device), nvml.source()
            except LookupError as error:
                self.gpu_source = f"none: {error}"
        self._sampler = call_sampler.Sampler(interval, operators=not replayed, gpu=gpu)
        self._process, self._on_host = psutil.Process(), device.type == "cpu"
        self._sampled: dict[str, Any] | None = None
        self._choices: dict[str, Any] | None = None

    def step(self, iteration: int) -> AbstractContextManager[None]:
        """Return a context for one training step."""
        return self._sampler.step(iteration)

    def values(self) -> dict[str, float | None]:
        """Return this rank's measurements of the step; collective at the first samples of an operator's shape."""
        self._sampled, reading = self._sampler.result(), self._sampler.reading
        values: dict[str, float | None] = dict.fromkeys(_PER_RANK)
        values["host_memory_bytes"] = self._process.memory_info().rss if self._on_host else None
        if self._sampled is not None and (taken := self._sampled["flux/operator_time_ms"]) is not None:
            values |= {"operators_ms": sum(taken.values()), "reduction_ms": self._sampler.reduction_ms}
        if reading is not None:
            values |= {name: getattr(reading, name) for name in nvml.FIELDS}
            values["throttle"] = float(reading.throttle)
        return values

    def fields(self, result: StepResult) -> dict[str, Any]:
        """Return the record's fields for this step."""
        fields: dict[str, Any] = {"flux/sampled": self._sampled is not None, "flux/wait_timeouts": timeouts.timeouts()}
        if memory := known(result.ranks["host_memory_bytes"]):
            fields["flux/host_memory_bytes"] = int(max(memory))
        if self._flux and self._choices != (made := call_sampler.choices()):  # else they are recorded
            self._choices = fields["flux/choices"] = made
        if self._sampled is not None:
            fields |= self._sampled | {"flux/ranks": by_rank(result.ranks)} | over_gpus(result.ranks)
        return fields


def by_rank(ranks: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """Return what is known of the ranks in a sampled step, a list of one value per rank each."""
    step_ms: list[float | None] = [1e3 * (seconds or 0.0) for seconds in ranks["seconds"]]
    names = ("operators_ms", "reduction_ms", "peak_memory_bytes", *nvml.FIELDS)
    return {"step_ms": step_ms, **{name: ranks[name] for name in names if known(ranks[name])}}


def over_gpus(ranks: dict[str, list[float | None]]) -> dict[str, Any]:
    """Return clocks, power and temperature over the ranks' GPUs, and how many were throttled by what."""
    if not known(ranks["throttle"]):
        return {"flux/gpu": None, "flux/throttle_reasons": None}
    clocks, memory, power, heat = (known(ranks[name]) for name in nvml.FIELDS)
    reasons = Counter(reason for bits in known(ranks["throttle"]) for reason in nvml.throttle_reasons(int(bits)))
    return {
        "flux/gpu": {
            "sm_clock_mhz_min": min(clocks, default=None),
            "sm_clock_mhz_mean": sum(clocks) / len(clocks) if clocks else None,
            "memory_clock_mhz_min": min(memory, default=None),
            "power_w_mean": sum(power) / len(power) if power else None,
            "power_w_max": max(power, default=None),
            "temperature_c_max": max(heat, default=None),
        },
        "flux/throttle_reasons": dict(reasons),
    }
