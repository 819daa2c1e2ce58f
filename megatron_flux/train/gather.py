"""One small collective behind every step: what each rank knows of it, on every rank.

It brings together what a record needs of all ranks (loss of the last stage, the slowest time, the largest memory,
layers of other stages) in a single all-gather of a few numbers per rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import all_gather
from megatron_flux.train.trainer import LocalStep

Values = Mapping[str, float | None]


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


def gathered(local: LocalStep, values: Values, device: torch.device) -> StepResult:
    """Bring together ``local`` and ``values`` (the same names on all ranks; None is "not known") of all ranks."""
    names = ["seconds", *values]
    mine = [local.loss_sum, local.loss_tokens, local.seconds, *values.values()]
    row = torch.tensor([[math.nan if v is None else v for v in mine]], dtype=torch.float64, device=device)
    table = all_gather(row, dist.group.WORLD).wait().tolist()
    ranks = {
        name: [None if math.isnan(line[i]) else line[i] for line in table] for i, name in enumerate(names, start=2)
    }
    return StepResult(
        # Diverged where it is NaN: a rank without a loss has 0 here, never NaN.
        loss=sum(line[0] for line in table) / sum(line[1] for line in table),
        grad_norm=local.grad_norm,
        lr=local.lr,
        seconds=max(line[2] for line in table),
        ranks=ranks,
    )


def known(values: list[float | None]) -> list[float]:
    """The values that are known."""
    return [value for value in values if value is not None]
