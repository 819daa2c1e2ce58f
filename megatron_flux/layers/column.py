"""The column-parallel linear of sequence parallelism: all-gather before the GEMM.

Contract: all ranks of the group call forward and backward in the same order. Forward may run several times before any
backward (pipeline warm-up, activation recompute): nothing but the saved tensors ties them together.

Backward enqueues three things in this order, so that each transfer has a GEMM to hide behind:
gather of ``x`` | dgrad GEMM and its reduce-scatter | wgrad GEMM.
The first has been enqueued before where a row-parallel layer came behind this one (:mod:`layers.prefetch`).

Hazard: under saved-tensor hooks (activation offloading) a saved weight comes back without the attributes that Megatron
set on the parameter, so the parameter itself is kept beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import Backends
from megatron_flux.layers.derivative import autocast_of, first_only
from megatron_flux.layers.prefetch import ColumnWeight, Gathered, offer
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
        overwrite_main_grad: bool,
        backends: Backends,
        epilogue_bias: bool,
        gather_ahead: bool,
    ) -> torch.Tensor:
        # A frozen weight needs no x in backward: not saving it frees the activation.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        main_grad = main_grad_of(weight, gradient_accumulation_fusion)
        ctx.weight = ColumnWeight(weight, main_grad, overwrite_main_grad, group, backends)
        ctx.autocast = autocast_of(x)
        offer(ctx, ctx.weight, 0 if gather_ahead else None)
        return ops.all_gather_gemm(x, weight, group, bias=bias, epilogue_bias=epilogue_bias, backend=backends.forward)

    @staticmethod
    @first_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.weight.saved_tensors(ctx)
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx, dw, db = column_backward(dy, x, weight, ctx.weight, need_dx=need_dx, need_dw=need_dw, need_db=need_db)
        return dx, dw, db, None, None, None, None, None, None


def column_backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    about: ColumnWeight,
    *,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``dx``, ``dw`` (as from :func:`weight_gradient`) and ``db`` of a column-parallel linear; None where not needed.

    Args:
        dy: ``[s, b, n]``.
        x: ``[s/tp, b, k]``; may be None where ``dw`` is not needed.
        weight: ``[n, k]``.
        about: the weight's parameter, ``main_grad``, group and backends, and what was gathered ahead.
        need_dx: compute ``dx``.
        need_dw: compute ``dw``.
        need_db: compute ``db``.
    """
    group, backends = about.group, about.backends
    dx = dw = db = pending = None
    gathered = about.gathered_ahead()
    if need_dw and gathered is None:
        gathered = Gathered(x, group, backends.wgrad)
    if need_dx:
        pending = ops.gemm_reduce_scatter(dy, weight, group, transposed=True, async_op=True, backend=backends.dgrad)
    whole = None if gathered is None else gathered.wait()
    if need_dw:
        dw = weight_gradient(about.parameter, about.main_grad, dy, whole, overwrite=about.overwrite_main_grad)
    if need_db:
        db = rows(dy).sum(dim=0)
    if pending is not None:
        dx = pending.wait()
    return dx, dw, db


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
    epilogue_bias: bool = False,
    gather_ahead: bool = True,
) -> torch.Tensor:
    """``all_gather(x) @ weight.T + bias``, differentiable.

    Args:
        x: ``[s/tp, b, k]``, the rank's rows of the sequence.
        weight: ``[n, k]``, the rank's columns of the layer (Megatron's ``[out, in]``). May be frozen.
        bias: ``[n]`` or None.
        group: the tensor-parallel group.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` where it has one.
        overwrite_main_grad: replace what is in ``main_grad`` instead of adding to it.
        backend: operator backend of all directions, see :func:`megatron_flux.ops.all_gather_gemm`, or of each.
        epilogue_bias: see there.
        gather_ahead: see :class:`~megatron_flux.FluxConfig`.

    Returns:
        ``[s, b, n]``.
    """
    return _ColumnParallelLinear.apply(
        x,
        weight,
        bias,
        group,
        gradient_accumulation_fusion,
        overwrite_main_grad,
        Backends.of(backend),
        epilogue_bias,
        gather_ahead,
    )
