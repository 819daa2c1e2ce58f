"""The row-parallel linear of sequence parallelism: reduce-scatter after the GEMM.

Contract: as in :mod:`megatron_flux.layers.column`. Backward gathers ``dy`` once, inside the dgrad operator, and reuses
the gathered ``dy`` for wgrad. Behind dgrad it starts the gather that the column-parallel layer before it will need
(:mod:`megatron_flux.layers.prefetch`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import Backends
from megatron_flux.layers import prefetch
from megatron_flux.layers.backward import LinearState, autocast_of, first_derivative_only
from megatron_flux.layers.wgrad import main_grad_of


class _RowParallelLinear(torch.autograd.Function):
    """``y = reduce_scatter(x @ weight.T)``; shapes in :mod:`megatron_flux.layers`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, linear: LinearState) -> torch.Tensor:
        # A frozen weight needs no x in backward: not saving it frees the activation.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.linear = linear
        ctx.column = prefetch.take(linear.group)
        return ops.gemm_reduce_scatter(x, weight, linear.group, backend=linear.backends.forward)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        linear: LinearState = ctx.linear
        group, backends = linear.group, linear.backends
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx = dw = None
        if need_dx:
            dx, dy = ops.all_gather_gemm(
                dy, weight, group, transposed=True, return_gathered=True, backend=backends.dgrad
            )
            if ctx.column is not None:
                ctx.column.prefetch()
        elif need_dw:
            dy = ops.all_gather(dy, group, backend=backends.wgrad).wait()
        if need_dw:
            dw = linear.weight_gradient(dy, x)
        return dx, dw, None


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
) -> torch.Tensor:
    """``reduce_scatter(x @ weight.T)``, differentiable. The bias is the caller's: it is added once, after the sum.

    Args:
        x: ``[s, b, k]``, the rank's columns of the activation.
        weight: ``[n, k]``, the rank's columns of the weight (Megatron's ``[out, in]``). May be frozen.
        group: the tensor-parallel group.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` where it has one.
        overwrite_main_grad: replace what is in ``main_grad`` instead of adding to it.
        backend: operator backend of all directions, see :func:`megatron_flux.ops.gemm_reduce_scatter`, or of each.

    Returns:
        ``[s/tp, b, n]``: the rank's rows of the sum.
    """
    main_grad = main_grad_of(weight, gradient_accumulation_fusion)
    linear = LinearState(weight, main_grad, overwrite_main_grad, group, Backends.of(backend), autocast_of(x))
    return _RowParallelLinear.apply(x, weight, linear)
