"""The column-parallel linear of sequence parallelism: all-gather before the GEMM.

Contract: all ranks of the group call forward and backward in the same order. Forward may run several times before any
backward (pipeline warm-up, activation recompute): nothing but the saved tensors ties them together.

Backward enqueues three things in this order, so that each transfer has a GEMM to hide behind:
gather of ``x`` | dgrad GEMM and its reduce-scatter | wgrad GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.layers.wgrad import main_grad_of, rows, weight_gradient


class _ColumnParallelLinear(torch.autograd.Function):
    """``y = all_gather(x) @ weight.T + bias``; shapes in :mod:`megatron_flux.layers`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: dist.ProcessGroup,
        gradient_accumulation_fusion: bool,
        backend: str,
    ) -> torch.Tensor:
        # A frozen weight needs no x in backward: not saving it frees the activation.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.main_grad = main_grad_of(weight, gradient_accumulation_fusion)
        ctx.group, ctx.backend = group, backend
        return ops.all_gather_gemm(x, weight, group, bias=bias, backend=backend)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = dw = db = gathered = pending = None
        if need_dw:
            gathered = ops.all_gather(x, ctx.group, backend=ctx.backend)
        if need_dx:
            pending = ops.gemm_reduce_scatter(
                dy, weight, ctx.group, transposed=True, async_op=True, backend=ctx.backend
            )
        if need_dw:
            dw = weight_gradient(weight, ctx.main_grad, dy, gathered.wait())
        if need_db:
            db = rows(dy).sum(dim=0)
        if need_dx:
            dx = pending.wait()
        return dx, dw, db, None, None, None


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    gradient_accumulation_fusion: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """``all_gather(x) @ weight.T + bias``, differentiable.

    Args:
        x: ``[s/tp, b, k]``, the rank's rows of the sequence.
        weight: ``[n, k]``, the rank's columns of the layer (Megatron's ``[out, in]``). May be frozen.
        bias: ``[n]`` or None.
        group: the tensor-parallel group.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` where it has one.
        backend: operator backend, see :func:`megatron_flux.ops.all_gather_gemm`.

    Returns:
        ``[s, b, n]``.
    """
    return _ColumnParallelLinear.apply(x, weight, bias, group, gradient_accumulation_fusion, backend)
