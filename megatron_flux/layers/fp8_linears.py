"""The column- and the row-parallel linear on FP8 operands, with sequence parallelism and without.

As :mod:`layers.linears`, with the same contract between ranks and the same order of work, but
    * ``x`` and ``dy`` are quantised by the rank that has them, and FP8 bytes are gathered: half of bf16's. Sums over
      ranks are of bf16;
    * FP8 operands are k-major, so dgrad takes the weight's transposed copy, and wgrad transposed copies of ``x`` and
      ``dy``: those that are gathered are transposed after it;
    * wgrad's GEMM is the library's (:class:`~megatron_flux.layers.fp8.Fp8`): torch adds no FP8 product to fp32. So are,
      without sequence parallelism, those that no communication belongs to: forward of a column-parallel layer, dgrad of
      a row-parallel one;
    * of a row-parallel layer in blocks of 128 ``dy`` is gathered twice, as TransformerEngine does: what dgrad
      multiplies has its scales by columns, what wgrad does by rows. The second gather lies in the memory of the next
      one, so the gather of the column-parallel layer's ``x`` waits until it is transposed;
    * gathered inputs are kept (``keep_gathered``) as bytes, where wgrad needs the same: with one scale, not in blocks;
    * nothing is sent but the bytes themselves (``wires``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.config import ALL_EXACT, Backends
from megatron_flux.layers import keep, prefetch
from megatron_flux.layers.backward import LinearState, first_derivative_only, main_grad_of, rows, unread_gradient
from megatron_flux.layers.fp8 import Fp8, PendingRows, Rows, gather
from megatron_flux.layers.prefetch import ColumnState
from megatron_flux.ops.fp8_operand import Fp8Operand


@dataclass(slots=True)
class Fp8ColumnState(ColumnState):
    """As its base; what is gathered are :class:`~megatron_flux.layers.fp8.Rows`, the first two of the saved tensors."""

    fp8: Fp8 | None = None
    _again: Rows | None = None
    """What was quantised once more, where ``x`` was saved as it came."""

    def _input(self, saved: Sequence[torch.Tensor | None]) -> Rows | None:
        data, scale_inv = saved[:2]
        if data is None:
            return None
        if scale_inv is not None:
            return Rows(data, scale_inv)
        if self._again is None:
            assert self.fp8 is not None  # noqa: S101 - of a layer
            self._again = self.fp8.input_again(_flat(data))
        return self._again

    def input(self, saved: Sequence[torch.Tensor | None]) -> Rows | None:
        """What wgrad needs of ``x``, of the rank's own; None where it is not needed. For the layer's backward."""
        found, self._again = self._input(saved), None
        return found

    def settle(self) -> None:
        """Before a kernel that waits for peers. For the layer's backward."""
        if self._pending is not None:
            self._pending.settle()

    def _gather(self, x: Rows) -> PendingRows:
        return gather(x, self.group, self.backends.wgrad)


class _ColumnParallelLinear(torch.autograd.Function):
    """``y = all_gather(norm(x)) @ weight.T + bias``, or without the gather; without a norm its weight is None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fp8: Fp8,
        linear: Fp8ColumnState,
        gather_ahead: bool,
    ) -> torch.Tensor:
        flat = _flat(x)
        statistics: tuple[torch.Tensor | None, ...] = ()
        if norm_weight is None:
            operand, saved = fp8.input(flat)
        else:
            operand, saved, *statistics = fp8.normed(flat, norm_weight, norm_bias)
        data, scale_inv = _save(ctx, saved)
        if fp8.keeps_input and weight.requires_grad:
            data = x
        kept = linear.kept
        prefetch.register(ctx, linear, 0 if gather_ahead and kept is None else None)
        y = _column_forward(x, operand, fp8, bias, linear.group, linear.backends, linear.sequence_parallel, kept)
        normed = () if norm_weight is None else (flat, norm_weight, *statistics)
        ctx.save_for_backward(data, scale_inv, *normed, *fp8.saved_weight())
        ctx.fp8, ctx.linear, ctx.shape, ctx.normed = fp8, linear, x.shape, len(normed)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fp8: Fp8 = ctx.fp8
        linear: Fp8ColumnState = ctx.linear
        saved = linear.saved_tensors(ctx)
        others = saved[2:]
        norm, weight = others[: ctx.normed], others[ctx.normed :]
        need_dx, need_norm_dw, need_norm_db, need_dw, need_db = ctx.needs_input_grad[:5]
        need_dnormed = need_dx or need_norm_dw or need_norm_db
        gradient = fp8.gradient(rows(dy).contiguous(), need_db)
        x = None
        if not linear.sequence_parallel:
            x = _saved(ctx, fp8, *saved[:2])
        elif linear.kept is None:
            x = linear.input(saved)
        pending = dw = dx = norm_dw = norm_db = None
        if need_dw and linear.sequence_parallel:
            linear.gather(x)
        if need_dnormed:
            linear.settle()
            reduced = ops.gemm_reduce_scatter if linear.sequence_parallel else ops.gemm_all_reduce
            pending = reduced(
                gradient.operand, fp8.dgrad_weight(weight), linear.group, out_dtype=dy.dtype,
                async_op=need_dw or linear.sequence_parallel,  # else nothing runs beside it
                split_accumulator=fp8.split[1], backend=linear.backends.dgrad,
            )  # fmt: skip
        if linear.sequence_parallel:
            whole = linear.gathered(x)  # waits for an early gather even where it is not needed
            x = fp8.transposed(whole, gradient=False) if need_dw else None
            gradient = gradient._replace(operand=None)
        if need_dw:
            whole = None  # wgrad's is the most memory that backward has: it goes without what it does not read
            dw = _weight_gradient(fp8, linear, x, gradient.transposed, dy.dtype)
        if pending is not None:
            dx = pending.wait() if isinstance(pending, Pending) else pending
            if norm:
                flat, norm_weight, mean, reciprocal_deviation = norm
                dx, norm_dw, norm_db = fp8.norm_backward(dx, flat, norm_weight, mean, reciprocal_deviation)
            dx = dx.view(ctx.shape) if need_dx else None
        fp8.end_backward()
        norm_dw, norm_db = norm_dw if need_norm_dw else None, norm_db if need_norm_db else None
        return dx, norm_dw, norm_db, dw, gradient.bias if need_db else None, None, None, None


def _column_forward(
    x: torch.Tensor,
    operand: Fp8Operand,
    fp8: Fp8,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    backends: Backends,
    sequence_parallel: bool,
    kept: keep.Kept | None = None,
) -> torch.Tensor:
    if not sequence_parallel:
        return fp8.multiply(operand, fp8.weight(), bias, dgrad=False).view(*x.shape[:-1], -1)
    try:
        y = ops.all_gather_gemm(
            operand,
            fp8.weight(),
            group,
            bias=bias,
            epilogue_bias=True,
            out_dtype=x.dtype,
            split_accumulator=fp8.split[0],
            return_gathered=kept is not None,
            backend=backends.forward,
        )
    except BaseException:
        prefetch.clear()  # the next row-parallel layer belongs to another graph
        raise
    if kept is not None:
        y, gathered = y
        kept.gathered = Rows(gathered.data, operand.scale_inv)
    return y.view(x.shape[0] * group.size(), *x.shape[1:-1], -1)


class _RowParallelLinear(torch.autograd.Function):
    """``y = reduce_scatter(x @ weight.T)``, or all_reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fp8: Fp8, linear: LinearState) -> torch.Tensor:
        operand, saved = fp8.input(_flat(x))
        ctx.column = prefetch.take(linear.group)
        y = _row_forward(x, operand, fp8, linear.group, linear.backends, linear.sequence_parallel)
        transposed = _save(ctx, saved)
        if fp8.keeps_input and weight.requires_grad:
            transposed = (x, None)
        ctx.save_for_backward(*transposed, *fp8.saved_weight())
        ctx.fp8, ctx.linear, ctx.shape = fp8, linear, x.shape
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        data, scale_inv, *weight = ctx.saved_tensors
        fp8: Fp8 = ctx.fp8
        linear: LinearState = ctx.linear
        need_dx, need_dw = ctx.needs_input_grad[:2]
        gradient = fp8.gradient(rows(dy).contiguous(), need_bias=False)
        dx = dw = whole = None
        transposed = gradient.transposed
        if need_dx and not linear.sequence_parallel:
            dx = fp8.multiply(gradient.operand, fp8.dgrad_weight(weight), None, dgrad=True).view(ctx.shape)
        elif need_dx:
            serves_wgrad = need_dw and not gradient.rows.in_blocks
            made = ops.all_gather_gemm(
                gradient.operand, fp8.dgrad_weight(weight), linear.group, return_gathered=serves_wgrad,
                out_dtype=dy.dtype, split_accumulator=fp8.split[1], backend=linear.backends.dgrad,
            )  # fmt: skip
            dx, gathered = made if serves_wgrad else (made, None)
            dx = dx.view(ctx.shape)
            if serves_wgrad:
                whole = Rows(gathered.data, gradient.rows.scale_inv)
        if need_dw and transposed is None:
            if whole is None:
                whole = gather(gradient.rows, linear.group, linear.backends.wgrad).wait()
            transposed = fp8.transposed(whole, gradient=True)
        whole = gathered = made = gradient = None  # wgrad's is the most memory that backward has
        if need_dx and ctx.column is not None:
            ctx.column.prefetch()
        if need_dw:
            dw = _weight_gradient(fp8, linear, _saved(ctx, fp8, data, scale_inv), transposed, dy.dtype)
        fp8.end_backward()
        return dx, dw, None, None


def _row_forward(
    x: torch.Tensor,
    operand: Fp8Operand,
    fp8: Fp8,
    group: dist.ProcessGroup,
    backends: Backends,
    sequence_parallel: bool,
) -> torch.Tensor:
    reduced = ops.gemm_reduce_scatter if sequence_parallel else ops.gemm_all_reduce
    y = reduced(
        operand, fp8.weight(), group, out_dtype=x.dtype, split_accumulator=fp8.split[0], backend=backends.forward
    )
    return y.view(x.shape[0] // (group.size() if sequence_parallel else 1), *x.shape[1:-1], -1)


def _save(ctx: Any, found: Rows | Fp8Operand | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What of a quantised input is saved for wgrad, and in ``ctx.input`` what else an operand consists of."""
    ctx.input = (found.dtype, found.scaling) if isinstance(found, Fp8Operand) else None
    return (None, None) if found is None else (found.data, found.scale_inv)


def _saved(ctx: Any, fp8: Fp8, data: torch.Tensor | None, scale_inv: torch.Tensor | None) -> Any:
    """The input as wgrad multiplies it, of this rank alone; None where it was not saved."""
    if data is None:
        return None
    return (
        fp8.input_again(_flat(data)) if ctx.input is None else Fp8Operand(data, ctx.input[0], scale_inv, ctx.input[1])
    )


def _weight_gradient(
    fp8: Fp8, linear: LinearState, x: Fp8Operand, dy: Fp8Operand | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """What backward returns for the weight; with ``main_grad`` the gradient itself is added there."""
    assert dy is not None  # noqa: S101 - wgrad is needed
    dw = fp8.wgrad(x, dy, linear.main_grad, linear.overwrite_main_grad)
    return dw if linear.main_grad is None else unread_gradient(linear.parameter, dtype)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """``[..., k]`` as ``[m, k]``, contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


def fp8_column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    fp8: Fp8,
    *,
    sequence_parallel: bool = True,
    norm: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
    gather_ahead: bool = True,
    keep_gathered: bool | None = None,
    keep_gathered_bytes: int | None = None,
) -> torch.Tensor:
    """``all_gather(x) @ weight.T + bias`` or, with a norm's weight and bias, ``all_gather(norm(x)) @ weight.T + bias``
    ``[s, b, n]`` of quantised operands, differentiable. The bias is added before the result is rounded.

    ``fp8`` is for this call alone; the others are those of :func:`~megatron_flux.layers.column_parallel_linear`.
    """
    backends = Backends.of(backend)
    if not torch.is_grad_enabled():
        prefetch.take(group)
        flat = _flat(x)
        operand = fp8.input(flat)[0] if norm is None else fp8.normed(flat, *norm)[0]
        return _column_forward(x, operand, fp8, bias, group, backends, sequence_parallel)
    main_grad = main_grad_of(weight, gradient_accumulation_fusion)
    linear = Fp8ColumnState(weight, main_grad, overwrite_main_grad, group, backends, ALL_EXACT, None, sequence_parallel)
    linear.fp8 = fp8
    if sequence_parallel and fp8.one_scale:
        bytes_of_x = x.new_empty(1, dtype=torch.float8_e4m3fn).expand(x.shape)  # of this size; none are read
        linear.kept = keep.reserve(
            bytes_of_x, weight, group, linear.backends, ALL_EXACT, keep_gathered, keep_gathered_bytes
        )
    gather_ahead = gather_ahead and sequence_parallel
    affine = (None, None) if norm is None else norm
    return _ColumnParallelLinear.apply(x, *affine, weight, bias, fp8, linear, gather_ahead)


def fp8_row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    fp8: Fp8,
    *,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    backend: str | Backends = "auto",
) -> torch.Tensor:
    """``reduce_scatter(x @ weight.T)`` ``[s/tp, b, n]``, or ``all_reduce`` of it ``[s, b, n]``, of quantised operands,
    differentiable; see :func:`fp8_column_parallel_linear`. The bias is the caller's.
    """
    backends = Backends.of(backend)
    if not torch.is_grad_enabled():
        prefetch.take(group)
        return _row_forward(x, fp8.input(_flat(x))[0], fp8, group, backends, sequence_parallel)
    main_grad = main_grad_of(weight, gradient_accumulation_fusion)
    linear = LinearState(weight, main_grad, overwrite_main_grad, group, backends, ALL_EXACT, None, sequence_parallel)
    return _RowParallelLinear.apply(x, weight, fp8, linear)
