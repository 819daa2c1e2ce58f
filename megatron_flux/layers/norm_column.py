"""A norm and the column-parallel linear behind it as one autograd function, as TransformerEngine's LayerNormLinear is.

Contract: as in :mod:`megatron_flux.layers.column`. The norm is computed once, on the rank's own rows, before the
gather. Saved for backward: the norm's input and statistics, and its output (the rank's rows; nothing gathered). One
function rather than two spares the host the second one's bookkeeping.

The norm's arithmetic is the caller's (:class:`Norm`), so that a patched layer runs the kernels that the stock one runs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import Backends
from megatron_flux.layers.column import column_backward
from megatron_flux.layers.derivative import autocast_of, first_only
from megatron_flux.layers.prefetch import ColumnWeight, offer
from megatron_flux.layers.wgrad import main_grad_of


class Norm(Protocol):
    """A norm over the last dimension; ``m`` rows of ``k``. The mean is None where the norm has none."""

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """``x`` ``[m, k]``, ``weight`` and ``bias`` ``[k]`` -> output ``[m, k]``, mean ``[m]``, 1/deviation ``[m]``."""

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        reciprocal_deviation: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``dy`` ``[m, k]`` -> gradients of ``x`` ``[m, k]``, of the weight ``[k]`` and of the bias ``[k]`` or None."""


class _NormColumnParallelLinear(torch.autograd.Function):
    """``y = all_gather(norm(x)) @ weight.T + bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Norm,
        group: dist.ProcessGroup,
        gradient_accumulation_fusion: bool,
        overwrite_main_grad: bool,
        backends: Backends,
        epilogue_bias: bool,
        gather_ahead: bool,
    ) -> torch.Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        normed, mean, reciprocal_deviation = norm.forward(rows, norm_weight, norm_bias)
        normed = normed.view(x.shape)
        ctx.save_for_backward(
            rows,
            norm_weight,
            mean,
            reciprocal_deviation,
            normed if weight.requires_grad else None,  # a frozen weight needs no input in backward
            weight,
        )
        ctx.norm, ctx.autocast = norm, autocast_of(x)
        main_grad = main_grad_of(weight, gradient_accumulation_fusion)
        ctx.weight = ColumnWeight(weight, main_grad, overwrite_main_grad, group, backends)
        offer(ctx, ctx.weight, 4 if gather_ahead else None)
        return ops.all_gather_gemm(
            normed, weight, group, bias=bias, epilogue_bias=epilogue_bias, backend=backends.forward
        )

    @staticmethod
    @first_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, norm_weight, mean, reciprocal_deviation, normed, weight = ctx.weight.saved_tensors(ctx)
        need_dx, need_norm_dw, need_norm_db, need_dw, need_db = ctx.needs_input_grad[:5]
        need_dnormed = need_dx or need_norm_dw or need_norm_db
        dnormed, dw, db = column_backward(
            dy, normed, weight, ctx.weight, need_dx=need_dnormed, need_dw=need_dw, need_db=need_db
        )
        dx = norm_dw = norm_db = None
        if dnormed is not None:
            dx, norm_dw, norm_db = ctx.norm.backward(
                dnormed.view(rows.shape), rows, norm_weight, mean, reciprocal_deviation
            )
            dx = dx.view(dnormed.shape) if need_dx else None
        return (
            dx,
            norm_dw if need_norm_dw else None,
            norm_db if need_norm_db else None,
            dw,
            db,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
        )


def norm_column_parallel_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    norm: Norm,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
    epilogue_bias: bool = False,
    gather_ahead: bool = True,
) -> torch.Tensor:
    """``all_gather(norm(x)) @ weight.T + bias``, differentiable.

    The gradients of the norm's parameters are this rank's rows' part: who owns them sums them over the group.

    Args:
        x: ``[s/tp, b, k]``, the rank's rows of the sequence.
        norm_weight: ``[k]``.
        norm_bias: ``[k]`` or None.
        weight: ``[n, k]``, the rank's columns of the layer (Megatron's ``[out, in]``). May be frozen.
        bias: ``[n]`` or None.
        group: the tensor-parallel group.
        norm: computes the norm and its gradients.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` where it has one.
        overwrite_main_grad: replace what is in ``main_grad`` instead of adding to it.
        backend: operator backend of all directions, see :func:`megatron_flux.ops.all_gather_gemm`, or of each.
        epilogue_bias: see there.
        gather_ahead: see :class:`~megatron_flux.FluxConfig`.

    Returns:
        ``[s, b, n]``.
    """
    return _NormColumnParallelLinear.apply(
        x,
        norm_weight,
        norm_bias,
        weight,
        bias,
        norm,
        group,
        gradient_accumulation_fusion,
        overwrite_main_grad,
        Backends.of(backend),
        epilogue_bias,
        gather_ahead,
    )
