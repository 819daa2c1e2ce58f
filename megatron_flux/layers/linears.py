"""The column- and the row-parallel linear, with sequence parallelism and without, in any precision.

Contract: all ranks of the group call forward and backward in the same order. Forward may run several times before any
backward (pipeline warm-up, activation recompute): only the saved tensors tie them together.

Order in the column layer's backward, so that each transfer has a GEMM to hide behind: gather of ``x`` | dgrad GEMM and
its reduce-scatter | wgrad GEMM. If a row-parallel layer followed this one in forward, that gather has begun behind the
row layer's dgrad, whose own gather of ``dy`` serves its wgrad too (:mod:`layers.prefetch`). Without sequence
parallelism nothing is gathered: the column layer's dgrad is summed over ranks while wgrad runs.

A norm before the column layer's gather (TransformerEngine's LayerNormLinear) is part of its autograd function, which
saves the host a second one's bookkeeping. It is computed once, on the rank's shard, by the stock layer's kernels
(:class:`~layers.precision.Norm`). Such a layer can return the norm's output too (``returned``), for adapters:

==============  =========================  ============================================================================
``"local"``     the norm's own output      its gradient is added to the rank's ``dx`` behind the sum over ranks
``"gathered"``  what the GEMM multiplies,  its gradient on a rank is a part of a sum over ranks, as dgrad's product is:
                with all ranks' rows       both are added, and scattered once (the addend of gemm_reduce_scatter)
==============  =========================  ============================================================================

    * The gathered output belongs to the caller (``own_gathered`` of the operators): what adapters save must stay. The
      layer itself does not keep it: wgrad gathers the saved shard.
    * In FP8 bytes are gathered for the GEMM, and the numbers before them for the caller, by a gather that begins first
      and runs beside the GEMM.
    * Without sequence parallelism the norm's output is whole on every rank, and so is its gradient: ``"local"``.

The precision supplies the operands (:mod:`layers.precision`). In FP8
    * the rank that has ``x`` or ``dy`` quantises it, and FP8 bytes are gathered. Sums over ranks are of bf16;
    * operands are k-major, so dgrad takes the weight's transposed copy, and wgrad transposed copies of ``x`` and
      ``dy``, which ranks transpose before the gather or behind it (:mod:`layers.fp8`);
    * GEMMs without communication are the library's: wgrad (torch adds no FP8 product to fp32) and, without sequence
      parallelism, forward of a column-parallel layer and dgrad of a row-parallel one;
    * in blocks of 128 a row-parallel layer gathers ``dy`` twice, as TransformerEngine does: dgrad's operand has its
      scales by columns, wgrad's by rows. Where the backend can hold a gather back, the second one travels behind the
      first, beside dgrad, in memory that the gather of the column-parallel layer's ``x`` leaves alone;
    * gathered inputs are kept (``keep_gathered``) as bytes, where wgrad needs the same: with one scale, not in blocks.

Where no gradient is wanted a layer is its operator alone: no autograd function, nothing saved, kept or registered. It
still ends an earlier layer's registration for prefetch: the first pass of recomputed layers is such a forward, and no
pair reaches across it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.config import ALL_EXACT, Backends, Wires
from megatron_flux.layers import keep, prefetch
from megatron_flux.layers.backward import any_autocast, autocast_of, first_derivative_only, rows, unread_gradient
from megatron_flux.layers.precision import EXACT, DelayedWgrad, LinearState, Precision, WeightedNorm
from megatron_flux.layers.prefetch import ColumnState, Returned
from megatron_flux.ops.backend import shaped


class _ColumnParallelLinear(torch.autograd.Function):
    """``y = all_gather(norm(x)) @ weight.T + bias``, the norm and the gather where there is one.

    Dimensions: ``S`` sequence, ``B`` micro-batch, ``K`` inputs and ``N`` results of the unsharded layer. In small
    letters they are the rank's shard: ``s = S / tp``. A micro-batch is whole on every rank.

    ===========  =====================================================  ==========================  ==================
    direction    with sequence parallelism                              operator                    without
    ===========  =====================================================  ==========================  ==================
    forward      ``x_sBK -> x_SBK;  y_SBn = x_SBK @ weight_nK.T``       all_gather_gemm             ``x_SBK`` is given
    dgrad        ``dx_SBK = dy_SBn @ weight_nK;  sum -> dx_sBK``        gemm_reduce_scatter         gemm_all_reduce
    wgrad        ``x_sBK -> x_SBK;  dweight_nK = dy_SBn.T @ x_SBK``     all_gather, started early   ``x_SBK`` is saved
    ===========  =====================================================  ==========================  ==================

    Saved: the shard ``x_sBK`` (the norm's output if there is one), and the norm's input and statistics of its rows.
    Without ``reduce_dgrad`` the sum of ``dx`` over ranks is somebody else's: then nothing is communicated.

    A delayed wgrad (``linear.delayed``) takes its operands with it, and the sum of ``dy`` that is the bias's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: ColumnState,
    ) -> Any:
        precision = linear.precision
        norm: Any = None if linear.norm is None else (linear.norm, norm_weight, norm_bias)
        local_x, multiplied, normed, saved = precision.operands(x, weight, norm)
        ctx.save_for_backward(*saved)
        ctx.linear, ctx.shape = linear, x.shape
        prefetch.register(ctx, linear)
        result = _column(linear, local_x, multiplied, normed, bias, x.shape)
        if linear.returned is not None:
            ctx.set_materialize_grads(False)  # an output that nobody read costs nothing
            ctx.y_shape = result[0].shape
        return result

    @staticmethod
    @first_derivative_only
    def backward(
        ctx: Any, dy: torch.Tensor | None, d_norm_output: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        linear: ColumnState = ctx.linear
        if dy is None:
            assert d_norm_output is not None  # noqa: S101 - autograd calls with one of them
            dy = d_norm_output.new_zeros(ctx.y_shape)
        addend = None
        if linear.returned == "gathered" and linear.sequence_parallel and d_norm_output is not None:
            addend, d_norm_output = rows(d_norm_output), None
        precision: Precision = linear.precision
        backend, how = linear.backends.dgrad, precision.dgrad_options
        saved = linear.saved_tensors(ctx)
        need_dx, need_norm_dw, need_norm_db, need_dw, need_db, _ = ctx.needs_input_grad
        need_dgrad = need_dx or need_norm_dw or need_norm_db
        deferred = need_dw and linear.deferred is not None and linear.deferred(dy)
        need_dw = need_dw and not deferred
        local_dy, weight, dy_for_wgrad, db = precision.gradient(dy, saved, need_dgrad, need_db)
        pending = dx = dw = norm_dw = norm_db = whole_x = None
        if linear.sequence_parallel:
            if need_dw:
                linear.gather(saved)
            if need_dgrad:
                if not precision.serves_wgrad:
                    linear.settle()
                pending = ops.gemm_reduce_scatter(
                    local_dy, weight, linear.group, addend=addend, async_op=True, backend=backend,
                    wire=linear.wires.gradients, **how,
                )  # fmt: skip
            whole_x = linear.gathered(saved)  # waits for an early gather even where it is not needed
        elif need_dgrad and not linear.reduce_dgrad:
            pending = precision.multiply(local_dy, weight, None, dgrad=True)
        elif need_dgrad:
            beside = need_dw and linear.delayed is None  # without wgrad nothing runs beside it
            pending = ops.gemm_all_reduce(local_dy, weight, linear.group, async_op=beside, backend=backend, **how)
        local_dy = weight = addend = None  # backward's memory peaks in wgrad: free what it does not read
        if need_dw:
            whole_x, dy_for_wgrad = precision.wgrad_operands(saved, whole_x, dy_for_wgrad)
            dw = precision.wgrad(linear, whole_x, dy_for_wgrad)
        if deferred:
            dw = unread_gradient(linear.parameter, dy.dtype)
        if need_db and db is None and linear.delayed is None:
            db = rows(dy).sum(dim=0)
        if pending is not None:
            dx = pending.wait() if isinstance(pending, Pending) else pending
            if linear.norm is not None:
                norm_x, *others = saved[:4]
                dx = _shaped(dx, norm_x.shape)
                if d_norm_output is not None:
                    dx = dx.add_(rows(d_norm_output))
                dx, norm_dw, norm_db = linear.norm.backward(dx, norm_x, *others)
            dx = _shaped(dx, ctx.shape) if need_dx else None
        if precision.updates_scales:
            precision.end_backward()
        norm_dw, norm_db = norm_dw if need_norm_dw else None, norm_db if need_norm_db else None
        return dx, norm_dw, norm_db, dw, db, None


def _column(
    linear: ColumnState, local_x: Any, weight: Any, norm_output: Any, bias: torch.Tensor | None, shape: torch.Size
) -> Any:
    """Run the forward; the gathered ``x`` goes to ``linear.kept``. With ``linear.returned`` return a pair."""
    precision, group, kept, returned = linear.precision, linear.group, linear.kept, linear.returned
    backend, wire = linear.backends.forward, linear.wires.activations
    if not linear.sequence_parallel:
        y = precision.multiply(local_x, weight, bias, dgrad=False)
        y = y if y.dim() == len(shape) else shaped(y, (*shape[:-1], y.shape[-1]))
        return y if returned is None else (y, norm_output)
    gathers_output, pending = returned == "gathered", None
    own = gathers_output and precision.gathered_dtype is None  # the GEMM's operand is the norm's output
    try:
        if gathers_output and not own:
            pending = ops.all_gather(norm_output, group, own_gathered=True, backend=backend, wire=wire)
        y = ops.all_gather_gemm(
            local_x, weight, group, bias=bias, epilogue_bias=precision.epilogue_bias,
            return_gathered=own or kept is not None, own_gathered=own, backend=backend, wire=wire,
            **precision.forward_options,
        )  # fmt: skip
        if pending is not None:
            norm_output = pending.wait()
    except BaseException:
        prefetch.clear()  # the next row-parallel layer belongs to another graph
        raise
    if own:
        y, norm_output = y
    elif kept is not None:
        y, kept.gathered = y
    y = y if y.dim() == len(shape) else shaped(y, (shape[0] * group.size(), *shape[1:-1], y.shape[-1]))
    return y if returned is None else (y, norm_output)


class _RowParallelLinear(torch.autograd.Function):
    """``y = reduce_scatter(x @ weight.T)``, or all_reduce.

    Letters are those of :class:`_ColumnParallelLinear`.

    ===========  =====================================================  ==========================  ==================
    direction    with sequence parallelism                              operator                    without
    ===========  =====================================================  ==========================  ==================
    forward      ``y_SBN = x_SBk @ weight_Nk.T;  sum -> y_sBN``         gemm_reduce_scatter         gemm_all_reduce
    dgrad        ``dy_sBN -> dy_SBN;  dx_SBk = dy_SBN @ weight_Nk``     all_gather_gemm             ``dy_SBN`` is given
    wgrad        ``dweight_Nk = dy_SBN.T @ x_SBk``                      reuses dgrad's gather
    ===========  =====================================================  ==========================  ==================
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, linear: LinearState) -> torch.Tensor:
        precision = linear.precision
        operand, multiplied, _, saved = precision.operands(x, weight)
        ctx.save_for_backward(*saved)
        ctx.linear, ctx.shape = linear, x.shape
        ctx.column = prefetch.take(linear.group)
        return _row(linear, operand, multiplied, x.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        linear: LinearState = ctx.linear
        precision: Precision = linear.precision
        saved = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        local_dy, weight, dy_for_wgrad, _ = precision.gradient(dy, saved, need_dx, False)
        dx = dw = pending = None
        whole = not linear.sequence_parallel  # every rank has all of dy
        if need_dx and whole:
            dx = precision.multiply(local_dy, weight, None, dgrad=True)
        elif need_dx:
            pending = precision.hold_dy(dy_for_wgrad, linear) if need_dw else None
            if pending is not None:
                dy_for_wgrad = None  # the local shard goes before dgrad
            whole = precision.serves_wgrad and need_dw and pending is None
            own = whole and linear.own_gathered and precision.gathered_dtype is None  # bytes are transposed anyway
            dx = ops.all_gather_gemm(
                local_dy, weight, linear.group, return_gathered=whole, own_gathered=own, backend=linear.backends.dgrad,
                wire=linear.wires.gradients, **precision.dgrad_options,
            )  # fmt: skip
            if pending is not None:
                pending.send()
            elif whole:
                dx, dy_for_wgrad = dx
        local_dy = weight = None  # as in the column layer
        if need_dw:
            if pending is not None:
                dy_for_wgrad = pending.wait()
            elif not whole:
                dy_for_wgrad = precision.gather_dy(dy_for_wgrad, linear).wait()
            pending = None
            x, dy_for_wgrad = precision.wgrad_operands(saved, None, dy_for_wgrad)  # no local shard is beside it now
        if need_dx and linear.sequence_parallel and ctx.column is not None:
            ctx.column.prefetch()
        if need_dw:
            dw = precision.wgrad(linear, x, dy_for_wgrad)
        if precision.updates_scales:
            precision.end_backward()
        low_rank, linear.low_rank = linear.low_rank, None
        if dx is None:
            return None, dw, None
        if low_rank is not None:
            dx = rows(dx).addmm_(*low_rank)
        return _shaped(dx, ctx.shape), dw, None


def row_state(y: torch.Tensor, x: torch.Tensor) -> LinearState | None:
    """Return the state of the row-parallel layer that has made ``y`` of this very ``x``; None: none has."""
    node: Any = y.grad_fn
    if type(node) is not _RowParallelLinear._backward_cls:  # type: ignore[attr-defined]
        return None
    before, output = node.next_functions[0]
    of_x = getattr(before, "variable", None) is x if x.is_leaf else (before, output) == (x.grad_fn, x.output_nr)
    return node.linear if of_x else None


def _row(linear: LinearState, x: Any, weight: Any, shape: torch.Size) -> torch.Tensor:
    group, backend, how = linear.group, linear.backends.forward, linear.precision.forward_options
    if linear.sequence_parallel:
        y = ops.gemm_reduce_scatter(x, weight, group, backend=backend, wire=linear.wires.activations, **how)
    else:
        y = ops.gemm_all_reduce(x, weight, group, backend=backend, **how)
    if y.dim() == len(shape):
        return y
    return shaped(y, (shape[0] // (group.size() if linear.sequence_parallel else 1), *shape[1:-1], y.shape[-1]))


def _shaped(dx: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return dx if dx.shape == shape else dx.view(shape)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = True,
    reduce_dgrad: bool = True,
    norm: WeightedNorm | None = None,
    returned: Returned | None = None,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    delayed: DelayedWgrad | None = None,
    deferred: Callable[[torch.Tensor], bool] | None = None,
    backend: str | Backends = "auto",
    wires: Wires = ALL_EXACT,
    epilogue_bias: bool = False,
    precision: Precision | None = None,
    gather_ahead: bool = True,
    keep_gathered: bool | None = None,
    keep_gathered_bytes: int | None = None,
) -> Any:
    """Return ``all_gather(norm(x)) @ weight.T + bias`` ``[s, b, n]``, the rank's columns of the result; differentiable.
    With ``returned`` a pair of it and the norm's output, whose gradient is part of that of ``x`` then.

    Args:
        x: ``[s/tp, b, k]``, the rank's shard of the sequence.
        weight: ``[n, k]``, the rank's columns of the layer (Megatron's ``[out, in]``). May be frozen.
        bias: ``[n]`` or None.
        group: the tensor-parallel group.
        sequence_parallel: without it ``x`` is ``[s, b, k]``, the same on all ranks, and its gradient the sum over them.
        reduce_dgrad: without sequence parallelism: sum the gradient of ``x`` over ranks. Otherwise the caller does.
        norm: the norm's arithmetic, its weight ``[k]``, and its bias ``[k]`` or None. The gradients of these two are of
            this rank's rows: with sequence parallelism their owner sums them over the group.
        returned: ``"local"``: the norm's output ``[s/tp, b, k]``; ``"gathered"``: ``[s, b, k]``, the gradient of which
            each rank has a part of.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` where it has one.
        overwrite_main_grad: replace what is in ``main_grad`` instead of adding to it.
        delayed: who computes wgrad behind backward.
        deferred: see :class:`~megatron_flux.layers.prefetch.ColumnState`; ``x`` is not gathered then.
        backend: operator backend of all directions, or of each; see :func:`megatron_flux.ops.all_gather_gemm`.
        wires: wire formats that a tuner may choose; exact alone with another precision than exact.
        epilogue_bias: see there; for the exact precision.
        precision: the operands of this call. None: tensors as they are.
        gather_ahead: see :class:`~megatron_flux.FluxConfig`, also for the next two.
        keep_gathered: keep the gathered ``x`` for wgrad.
        keep_gathered_bytes: budget of the process for that.
    """
    backends = backend if isinstance(backend, Backends) else Backends.of(backend)
    precision = EXACT[epilogue_bias] if precision is None else precision
    kernels, norm_weight, norm_bias = (None, None, None) if norm is None else norm
    main_grad = getattr(weight, "main_grad", None) if gradient_accumulation_fusion else None
    autocast = autocast_of(x) if any_autocast() else None
    linear = ColumnState(
        weight, main_grad, overwrite_main_grad, group, backends, wires, autocast, sequence_parallel, precision, delayed,
        norm=kernels, reduce_dgrad=reduce_dgrad, returned=returned, deferred=deferred,
    )  # fmt: skip
    if not torch.is_grad_enabled():
        state_of(group).column = None
        local_x, multiplied, normed, _ = precision.operands(x, weight, norm)
        return _column(linear, local_x, multiplied, normed, bias, x.shape)
    if sequence_parallel and deferred is None:
        if precision.serves_wgrad and returned != "gathered":
            linear.kept = keep.reserve(x, linear, keep_gathered, keep_gathered_bytes)
        linear.gather_ahead = gather_ahead and linear.kept is None
    return _ColumnParallelLinear.apply(x, norm_weight, norm_bias, weight, bias, linear)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = True,
    gradient_accumulation_fusion: bool = False,
    overwrite_main_grad: bool = False,
    delayed: DelayedWgrad | None = None,
    backend: str | Backends = "auto",
    wires: Wires = ALL_EXACT,
    precision: Precision = EXACT[False],
) -> torch.Tensor:
    """Return ``reduce_scatter(x @ weight.T)`` ``[s/tp, b, n]``, the rank's shard of the sum; differentiable. Without
    ``sequence_parallel`` ``all_reduce(x @ weight.T)`` ``[s, b, n]``, the sum on every rank.

    ``x`` is ``[s, b, k]`` and ``weight`` ``[n, k]``, the rank's columns of both; the options are those of
    :func:`column_parallel_linear`. The bias is the caller's: it is added once, after the sum.
    """
    backends = backend if isinstance(backend, Backends) else Backends.of(backend)
    main_grad = getattr(weight, "main_grad", None) if gradient_accumulation_fusion else None
    autocast = autocast_of(x) if any_autocast() else None
    linear = LinearState(
        weight, main_grad, overwrite_main_grad, group, backends, wires, autocast, sequence_parallel, precision, delayed
    )
    if not torch.is_grad_enabled():
        state_of(group).column = None
        operand, multiplied, *_ = precision.operands(x, weight)
        return _row(linear, operand, multiplied, x.shape)
    return _RowParallelLinear.apply(x, weight, linear)
