"""Whether two arms compute the same: output, input gradient and weight gradients of one step, over all ranks.

Arms share weights and input, so results can be subtracted. Two correct arms differ by rounding alone: other GEMM
kernels, other orders of adding partial sums; through a few bf16 layers that is about one per cent. A lost shard, a
stale buffer or a missing gradient is far above it, if it is looked for in the right place:

* output and input gradient are compared without what the residual connections carry past the layers unchanged;
* weight gradients are compared one by one, as their products with a fixed random vector: a wrong gradient may have the
  right norm, and keeping every gradient of every arm would take more memory than the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_flux.bench.collectives import Collectives
from megatron_flux.bench.layer_arms import Arm

TOLERANCE = 0.05
"""Of every difference, relative."""


@dataclass
class Result:
    """What one step left on this rank, and its norms over all ranks."""

    tensors: list[torch.Tensor]
    """Output and input gradient without the residual's share, then one product per weight gradient."""
    norms: list[float]


class Agreement:
    """Runs arms on one input and compares what they leave."""

    def __init__(
        self, collectives: Collectives, weights: dict[str, torch.nn.Parameter], x: torch.Tensor, dy: torch.Tensor
    ) -> None:
        """``weights`` are those all arms share, ``x`` and ``dy`` what every step is given."""
        self.collectives, self.weights = collectives, weights
        self.x, self.dy = x.detach(), dy

    def observe(self, arm: Arm) -> Result:
        """Run one step of ``arm`` on zeroed main gradients. A collective call."""
        for parameter in self.weights.values():
            parameter.main_grad.zero_()
        with arm.active():
            y, dx = arm.step()
        tensors = [y.float() - self.x.float(), dx.float() - self.dy.float()]
        tensors += [_product(self.weights[name].main_grad) for name in sorted(self.weights)]
        return Result(tensors, self._norms(tensors))

    def compare(self, result: Result, reference: Result) -> dict[str, Any]:
        """Relative differences, and whether all are within the tolerance (NaN is not). A collective call.

        Returns:
            ``y``, ``dx``: norm of the difference; ``wgrad``: the same of the weight that differs most; ``y_norm``,
            ``dx_norm``: difference of the norms; ``ok``.
        """
        differences = self._norms([a - b for a, b in zip(result.tensors, reference.tensors, strict=True)])
        y, dx, *wgrads = (_ratio(d, norm) for d, norm in zip(differences, reference.norms, strict=True))
        y_norm, dx_norm = (_ratio(abs(a - b), b) for a, b in zip(result.norms[:2], reference.norms[:2], strict=True))
        # max() would pass over a NaN.
        wgrad = math.nan if any(math.isnan(w) for w in wgrads) else max(wgrads)
        found = {"y": y, "dx": dx, "wgrad": wgrad, "y_norm": y_norm, "dx_norm": dx_norm}
        ok = all(value <= TOLERANCE for value in found.values())
        # JSON has no NaN.
        return {**{name: float(f"{v:.3g}") if math.isfinite(v) else None for name, v in found.items()}, "ok": ok}

    def _norms(self, tensors: list[torch.Tensor]) -> list[float]:
        squares = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) ** 2 for t in tensors])
        return [s**0.5 for s in self.collectives.sum(squares.tolist())]


def _product(gradient: torch.Tensor) -> torch.Tensor:
    """A matrix times a fixed random vector; a vector as it is."""
    if gradient.dim() == 1:
        return gradient.clone()
    generator = torch.Generator(device=gradient.device).manual_seed(2)
    vector = torch.randn(gradient.shape[1], generator=generator, device=gradient.device, dtype=gradient.dtype)
    return gradient @ vector


def _ratio(difference: float, norm: float) -> float:
    return difference / norm if norm else math.nan
