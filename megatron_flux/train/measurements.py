"""Results of a step on every rank, gathered in one small all-gather after it, and what a record says of all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import nvml
from megatron_flux.comm.collectives import all_gather


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
