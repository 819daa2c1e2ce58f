"""Compare the results of variants of ``bench layer``: on one step over all ranks, before anything is timed.

Variants share weights and input, so results can be subtracted. Two correct variants differ by rounding alone: through a
few bf16 layers that is about one per cent. A lost shard, a stale buffer or a missing gradient is far above it, if it is
looked for in the right place:

* output and input gradient are compared without what the residual connections carry past the layers unchanged;
* weight gradients are compared one by one, as their products with a fixed random vector: a wrong gradient may have the
  right norm, and keeping every gradient of every variant would take more memory than the layers.

In FP8 one bit of bf16 between two variants may become one of FP8, sixteen times as large and more, where the next
linear quantises. That takes two correct variants no further apart than what rounding to FP8 changes at all, and
:data:`LARGEST_ROUNDING` bounds that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.bench.harness import Variant
from megatron_flux.comm import agreement
from megatron_flux.comm.collectives import all_reduce
from megatron_flux.config import ALL_EXACT, Wires

TOLERANCE = {"exact": 0.05, "int8": 0.08}
"""Relative, for every difference between variants, by wire format: int8 loses 0.3 to 0.7 per cent a transfer."""
LARGEST_ROUNDING = 0.3
"""Largest difference in FP8, relative to the result's norm. A missing addend of one of eight ranks is a third of it."""

Result = list[torch.Tensor]
"""Results of one step on this rank: output and input gradient without the residual's share, then one product per weight
gradient; of inference the output alone."""


def observe(variant: Variant, x: torch.Tensor, dy: torch.Tensor | None, weights: Mapping[str, Any]) -> Result:
    """Run one step of ``variant`` on zeroed main gradients of the ``weights`` that are trained."""
    trained = [weight for _, weight in sorted(weights.items()) if weight.requires_grad]
    for weight in trained:
        weight.main_grad.zero_()
    with variant.active():
        y, *gradients = variant.run()
    result = [y.float() - x.detach().float()]
    if dy is not None:
        result.append(gradients[0].float() - dy.float())
    return result + [_product(weight.main_grad) for weight in trained]


def summed(result: Result, weights: Mapping[str, torch.nn.Parameter], group: dist.ProcessGroup) -> Result:
    """Return ``result`` with the sums over ``group`` of what its ranks have of gradients for their own tokens alone."""
    trained = [weight for _, weight in sorted(weights.items()) if weight.requires_grad]
    partial = [False] * (len(result) - len(trained)) + [getattr(w, "sequence_parallel", False) for w in trained]
    return [
        all_reduce(one.clone(), group).wait() if of_own else one for one, of_own in zip(result, partial, strict=True)
    ]


def differences(result: Result, reference: Result, ranks: dist.ProcessGroup) -> dict[str, float]:
    """Return norms of the differences relative to the reference's: ``y``, ``dx`` and the weight gradient that differs
    most (``wgrad``).
    """
    apart = _norms([a - b for a, b in zip(result, reference, strict=True)], ranks)
    y, *gradients = (d / norm if norm else math.nan for d, norm in zip(apart, _norms(reference, ranks), strict=True))
    relative = {"y": y}
    if gradients:
        dx, *wgrads = gradients
        relative["dx"] = dx
        if wgrads:  # NaN if one is
            relative["wgrad"] = torch.tensor(wgrads, dtype=torch.float64).max().item()
    return relative


def compare(
    result: Result,
    reference: Result,
    ranks: dist.ProcessGroup,
    rounding: Mapping[str, float] | None,
    wires: Wires = ALL_EXACT,
) -> dict[str, Any]:
    """Return :func:`differences`, and ``ok``: all within the tolerance, or within what FP8's ``rounding`` changes."""
    values = differences(result, reference, ranks)
    if rounding is None:
        most = dict.fromkeys(values, max(map(TOLERANCE.__getitem__, wires)))
    else:
        most = {name: min(value, LARGEST_ROUNDING) for name, value in rounding.items()}
    return {**rounded(values), "ok": all(value <= most[name] for name, value in values.items())}


def rounded(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the values for JSON, which has no NaN."""
    return {name: float(f"{value:.3g}") if math.isfinite(value) else None for name, value in values.items()}


def _norms(tensors: Result, ranks: dist.ProcessGroup) -> list[float]:
    squares = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) ** 2 for t in tensors])
    by_rank = agreement.of_all_ranks(squares.tolist(), ranks)
    return [math.fsum(column) ** 0.5 for column in zip(*by_rank, strict=True)]


def _product(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dim() == 1:
        return gradient.clone()
    generator = torch.Generator(device=gradient.device).manual_seed(2)
    vector = torch.randn(gradient.shape[1], generator=generator, device=gradient.device, dtype=gradient.dtype)
    return gradient @ vector
