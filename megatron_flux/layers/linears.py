"""The column- and the row-parallel linear, with sequence parallelism and without.

Contract: all ranks of the group call forward and backward in the same order. Forward may run several times before any
backward (pipeline warm-up, activation recompute): nothing but the saved tensors ties them together.

The column layer's backward enqueues three things in this order, so that each transfer has a GEMM to hide behind:
gather of ``x`` | dgrad GEMM and its reduce-scatter | wgrad GEMM.
The first has been enqueued before where a row-parallel layer came behind this one: the row layer's backward gathers
``dy`` once, inside the dgrad operator, reuses it for wgrad, and behind dgrad starts the gather that the column layer
before it will need (:mod:`layers.prefetch`).

Without sequence parallelism nothing is gathered: the row layer's forward and the column layer's dgrad are summed over
ranks, the latter while wgrad runs; the other two are GEMMs of the rank's own.

With a norm before the column layer's gather, as in TransformerEngine's LayerNormLinear, norm and linear are one
autograd function, which spares the host the second one's bookkeeping. The norm is computed once, on the rank's own
rows. Saved for backward: the norm's input and statistics, and its output (the rank's rows; nothing gathered). The
norm's arithmetic is the caller's (:class:`Norm`), so that a patched layer runs the kernels that the stock one runs.

Where no gradient is wanted (``torch.inference_mode()``, ``torch.no_grad()``) a layer is its operator alone: no autograd
function, nothing saved, kept or registered. What an earlier layer has registered ends all the same: the first pass of
recomputed layers is such a forward, and no pair reaches across it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.config import ALL_EXACT, Backends, Wires
from megatron_flux.layers import keep, prefetch
from megatron_flux.layers.backward import (
    LinearState,
    autocast_of,
    first_derivative_only,
    main_grad_of,
    rows,
    weight_gradient,
)
from megatron_flux.layers.prefetch import ColumnState
from megatron_flux.ops.gemm import gemm


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


class _ColumnParallelLinear(torch.autograd.Function):
    """``y = all_gather(x) @ weight.T + bias``; shapes, and what is not gathered, in :mod:`megatron_flux.layers`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: ColumnState,
        epilogue_bias: bool,
        gather_ahead: bool,
    ) -> torch.Tensor:
        # A frozen weight needs no x in backward: not saving it frees the activation.
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.linear = linear
        return _column_forward(ctx, x, weight, bias, epilogue_bias, 0 if gather_ahead else None)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.linear.saved_tensors(ctx)
        return *_column_backward(ctx.linear, dy, x, weight, *ctx.needs_input_grad[:3]), None, None, None


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
        linear: ColumnState,
        epilogue_bias: bool,
        gather_ahead: bool,
    ) -> torch.Tensor:
        flat = x.contiguous().view(-1, x.shape[-1])
        normed, mean, reciprocal_deviation = norm.forward(flat, norm_weight, norm_bias)
        normed = normed.view(x.shape)
        saved = normed if weight.requires_grad else None  # a frozen weight needs no input in backward
        ctx.save_for_backward(flat, norm_weight, mean, reciprocal_deviation, saved, weight)
        ctx.norm, ctx.linear = norm, linear
        return _column_forward(ctx, normed, weight, bias, epilogue_bias, 4 if gather_ahead else None)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, norm_weight, mean, reciprocal_deviation, normed, weight = ctx.linear.saved_tensors(ctx)
        need_dx, need_norm_dw, need_norm_db, need_dw, need_db = ctx.needs_input_grad[:5]
        need_dnormed = need_dx or need_norm_dw or need_norm_db
        dnormed, dw, db = _column_backward(ctx.linear, dy, normed, weight, need_dnormed, need_dw, need_db)
        dx = norm_dw = norm_db = None
        if dnormed is not None:
            dx, norm_dw, norm_db = ctx.norm.backward(
                dnormed.view(flat.shape), flat, norm_weight, mean, reciprocal_deviation
            )
            dx = dx.view(dnormed.shape) if need_dx else None
        norm_dw, norm_db = norm_dw if need_norm_dw else None, norm_db if need_norm_db else None
        return dx, norm_dw, norm_db, dw, db, None, None, None, None


def _column_forward(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue_bias: bool, saved: int | None
) -> torch.Tensor:
    """``saved``: which of the saved tensors is ``x``; None if it is not to be prefetched."""
    linear: ColumnState = ctx.linear
    kept = linear.kept
    prefetch.register(ctx, linear, saved if kept is None else None)
    if not linear.sequence_parallel:
        return _multiply(x, weight, bias, epilogue_bias)
    how: dict[str, Any] = {"backend": linear.backends.forward, "wire": linear.wires.activations}
    try:
        if kept is not None:
            y, kept.gathered = ops.all_gather_gemm(
                x, weight, linear.group, bias=bias, epilogue_bias=epilogue_bias, return_gathered=True, **how
            )
            return y
        return ops.all_gather_gemm(x, weight, linear.group, bias=bias, epilogue_bias=epilogue_bias, **how)
    except BaseException:
        prefetch.clear()  # the next row-parallel layer belongs to another graph
        raise


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue_bias: bool) -> torch.Tensor:
    """``x @ weight.T + bias`` of this rank alone, the bias added where all_gather_gemm adds it."""
    if bias is None or not epilogue_bias:
        y = gemm(x, weight, transposed=False)
        return y if bias is None else y.add_(bias)
    y = gemm(rows(x), weight, transposed=False, bias=bias)
    # Not a view for autograd, as operators' results are none.
    return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[-1]))


def _column_backward(
    linear: ColumnState,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``dx``, ``dw`` (as from :func:`~layers.backward.weight_gradient`) and ``db``, None where not needed.

    ``dy`` is ``[s, b, n]``, ``x`` ``[s/tp, b, k]`` (None where ``dw`` is not needed), ``weight`` ``[n, k]``.
    """
    group, backend = linear.group, linear.backends.dgrad
    dx = dw = db = pending = None
    if linear.sequence_parallel:
        if need_dw:
            linear.gather(x)
        if need_dx:
            how: dict[str, Any] = {"backend": backend, "wire": linear.wires.gradients}
            pending = ops.gemm_reduce_scatter(dy, weight, group, transposed=True, async_op=True, **how)
        whole = linear.gathered(x)  # waits for an early gather even where it is not needed
    else:
        whole = x
        if need_dx and need_dw:
            pending = ops.gemm_all_reduce(dy, weight, group, transposed=True, async_op=True, backend=backend)
        elif need_dx:  # nothing runs beside it
            dx = ops.gemm_all_reduce(dy, weight, group, transposed=True, backend=backend)
    if need_dw:
        dw = weight_gradient(linear.parameter, linear.main_grad, dy, whole, overwrite=linear.overwrite_main_grad)
    if need_db:
        db = rows(dy).sum(dim=0)
    if pending is not None:
        dx = pending.wait()
    return dx, dw, db


class _RowParallelLinear(torch.autograd.Function):
    """``y = reduce_scatter(x @ weight.T)``; shapes, and what is summed whole, in :mod:`megatron_flux.layers`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, linear: LinearState) -> torch.Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.linear = linear
        ctx.column = prefetch.take(linear.group)
        return _row_forward(x, weight, linear.group, linear.backends, linear.wires, linear.sequence_parallel)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        linear: LinearState = ctx.linear
        group, backends, wire = linear.group, linear.backends, linear.wires.gradients
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx = dw = None
        if not linear.sequence_parallel:  # every rank has all of dy
            dx = gemm(dy, weight, transposed=True) if need_dx else None
        elif need_dx:
            dx, dy = ops.all_gather_gemm(
                dy, weight, group, transposed=True, return_gathered=True, backend=backends.dgrad, wire=wire
            )
            if ctx.column is not None:
                ctx.column.prefetch()
        elif need_dw:
            dy = ops.all_gather(dy, group, backend=backends.wgrad, wire=wire).wait()
        if need_dw:
            dw = weight_gradient(linear.parameter, linear.main_grad, dy, x, overwrite=linear.overwrite_main_grad)
        return dx, dw, None


def _row_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    backends: Backends,
    wires: Wires,
    sequence_parallel: bool,
) -> torch.Tensor:
    if not sequence_parallel:
        return ops.gemm_all_reduce(x, weight, group, backend=backends.forward)
    return ops.gemm_reduce_scatter(x, weight, group, backend=backends.forward, wire=wires.activations)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = True,
    norm: tuple[Norm, torch.Tensor, torch.Tensor | None] | None = None,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
    wires: Wires = ALL_EXACT,
    epilogue_bias: bool = False,
    gather_ahead: bool = True,
    keep_gathered: bool | None = None,
    keep_gathered_bytes: int | None = None,
) -> torch.Tensor:
    """``all_gather(x) @ weight.T + bias`` or ``all_gather(norm(x)) @ weight.T + bias`` ``[s, b, n]``, differentiable.

    Args:
        x: ``[s/tp, b, k]``, the rank's rows of the sequence.
        weight: ``[n, k]``, the rank's columns of the layer (Megatron's ``[out, in]``). May be frozen.
        bias: ``[n]`` or None.
        group: the tensor-parallel group.
        sequence_parallel: without it ``x`` is ``[s, b, k]``, the same on all ranks, and its gradient the sum over them.
        norm: what computes the norm and its gradients, its weight ``[k]``, and its bias ``[k]`` or None. The gradients
            of these two are of the rows that this rank has: with sequence parallelism their owner sums them over the
            group.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` where it has one.
        overwrite_main_grad: replace what is in ``main_grad`` instead of adding to it.
        backend: operator backend of all directions, or of each; see :func:`megatron_flux.ops.all_gather_gemm`.
        wires: what it may send, where it is a tuner's choice.
        epilogue_bias: see there.
        gather_ahead: see :class:`~megatron_flux.FluxConfig`.
        keep_gathered: likewise.
        keep_gathered_bytes: likewise.
    """
    backends = Backends.of(backend)
    if not torch.is_grad_enabled():
        prefetch.take(group)
        if norm is not None:
            x = norm[0].forward(x.contiguous().view(-1, x.shape[-1]), *norm[1:])[0].view(x.shape)
        if not sequence_parallel:
            return _multiply(x, weight, bias, epilogue_bias)
        how: dict[str, Any] = {"backend": backends.forward, "wire": wires.activations}
        return ops.all_gather_gemm(x, weight, group, bias=bias, epilogue_bias=epilogue_bias, **how)
    main_grad = main_grad_of(weight, gradient_accumulation_fusion)
    linear = ColumnState(
        weight, main_grad, overwrite_main_grad, group, backends, wires, autocast_of(x), sequence_parallel
    )
    if sequence_parallel:
        linear.kept = keep.reserve(x, weight, group, linear.backends, wires, keep_gathered, keep_gathered_bytes)
    gather_ahead = gather_ahead and sequence_parallel
    if norm is None:
        return _ColumnParallelLinear.apply(x, weight, bias, linear, epilogue_bias, gather_ahead)
    kernels, *affine = norm
    return _NormColumnParallelLinear.apply(x, *affine, weight, bias, kernels, linear, epilogue_bias, gather_ahead)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
    wires: Wires = ALL_EXACT,
) -> torch.Tensor:
    """``reduce_scatter(x @ weight.T)`` ``[s/tp, b, n]``, the rank's rows of the sum, differentiable; without
    ``sequence_parallel`` ``all_reduce(x @ weight.T)`` ``[s, b, n]``, the sum on every rank.

    ``x`` is ``[s, b, k]`` and ``weight`` ``[n, k]``, the rank's columns of both; the options are those of
    :func:`column_parallel_linear`. The bias is the caller's: it is added once, after the sum.
    """
    backends = Backends.of(backend)
    if not torch.is_grad_enabled():
        prefetch.take(group)
        return _row_forward(x, weight, group, backends, wires, sequence_parallel)
    main_grad = main_grad_of(weight, gradient_accumulation_fusion)
    linear = LinearState(
        weight, main_grad, overwrite_main_grad, group, backends, wires, autocast_of(x), sequence_parallel
    )
    return _RowParallelLinear.apply(x, weight, linear)
