"""The public operators: check, flatten leading dimensions, pick a backend, count.

Leading dimensions: ``x`` may be ``[s, b, k]`` as in Megatron. It is read as a matrix of ``s*b`` rows, so the shards are
blocks of the first dimension, and results get their leading dimensions back with the first one multiplied
(all_gather) or divided (reduce_scatter) by ``tp``.

With ``tp`` = 1, and of no rows, operators are the GEMM alone. That no rank has rows is compared over the group, once.

The operators are not differentiable: their results never require a gradient, whatever the operands do. A gradient
through the GEMM alone would be silently wrong. :mod:`megatron_flux.layers` has the autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.ops import fast_path, fp8_operators
from megatron_flux.ops.backends.registry import run
from megatron_flux.ops.call import OperatorCall, aligned, check_operands, matrix, without_rows
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair
from megatron_flux.ops.gemm import gemm

_unsafe_view = torch.ops.aten._unsafe_view.default

_Operator = TypeVar("_Operator", bound=Callable[..., Any])


def _without_grad(operator: _Operator) -> _Operator:
    """Run without recording for autograd. Inside an autograd function that is so already, and costs nothing."""

    @functools.wraps(operator)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return operator(*args, **kwargs)
        with torch.no_grad():
            return operator(*args, **kwargs)

    return cast(_Operator, call)


@overload
def all_gather_gemm(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    epilogue_bias: bool = False, transposed: bool = False, return_gathered: Literal[False] = False,
    backend: str = "auto", wire: str = "exact",
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_gather_gemm(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    epilogue_bias: bool = False, transposed: bool = False, return_gathered: Literal[True], backend: str = "auto",
    wire: str = "exact",
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def all_gather_gemm(
    x: Fp8Operand, weight: Fp8Operand, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    epilogue_bias: bool = False, return_gathered: Literal[False] = False, backend: str = "auto",
    split_accumulator: bool = False, out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor: ...  # fmt: skip
@overload
def all_gather_gemm(
    x: Fp8Operand, weight: Fp8Operand, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    epilogue_bias: bool = False, return_gathered: Literal[True], backend: str = "auto", split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, Fp8Operand]: ...  # fmt: skip
@_without_grad
def all_gather_gemm(
    x: torch.Tensor | Fp8Operand,
    weight: torch.Tensor | Fp8Operand,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue_bias: bool = False,
    transposed: bool = False,
    return_gathered: bool = False,
    backend: str = "auto",
    wire: str = "exact",
    split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | Fp8Operand]:
    """Gather ``x`` over ``group`` and multiply: ``all_gather(x) @ weight.T (+ bias)``.

    Args:
        x: ``[m/tp, k]`` or ``[s/tp, ..., k]``; fp32, bf16 or fp16. Or an
            :class:`~megatron_flux.ops.fp8_operand.Fp8Operand` ``[m/tp, k]``, as the weight then: both scaled as a
            whole, x alike on all ranks, or x in blocks of 1x128 and the weight of 128x128.
        weight: ``[n, k]``, or ``[k, n]`` if ``transposed``; same dtype and device as ``x``. Copied only
            where it does not begin at a multiple of 16 bytes.
        group: process group of ``tp`` ranks; None is the default group.
        bias: ``[n]``, added to every row.
        epilogue_bias: add the bias in fp32 before the result is rounded, as cuBLASLt's epilogue does and so
            TransformerEngine's linears, not to the rounded result as Megatron's own linears do: a bias that is smaller
            than the result's last bit is not lost. All backends do so but ``pipelined``, which adds it afterwards.
        transposed: ``weight`` is ``[k, n]`` (Megatron's ``[out, in]`` weight in dgrad).
        return_gathered: also return the gathered ``x`` ``[m, k]`` (same leading dimensions as the result). The
            caller may keep it until its next all_gather_gemm or gemm_reduce_scatter on the same group.
        backend: ``auto`` or a name from :func:`backend_names`.
        wire: what the tuner may send over a ``host`` link: ``exact``, or also ``fp8`` or ``int8``. Not with FP8.
        split_accumulator: of FP8: the tensor core's sums, of 14 bits on Hopper, go to fp32 every 128 of k.
            TransformerEngine's recipes ask for it in dgrad and wgrad. Blocks always do so.
        out_dtype: of the result of FP8 operands, and of their bias: bf16 or fp16.

    Returns:
        ``[m, n]`` or ``[s, ..., n]``; with ``return_gathered`` a pair of it and the gathered ``x``, of FP8 with ``tp``
        shards.

    Raises:
        UserError: shapes, dtypes or devices that do not fit, or an unusable backend.
        OperatorError: the communication failed; names rank, peers and shape.
    """
    group = _group(group)
    if isinstance(x, Fp8Operand) or isinstance(weight, Fp8Operand):
        pair = _fp8("all_gather_gemm", x, weight, out_dtype, split_accumulator, transposed, wire)
        return fp8_operators.all_gather_gemm(
            pair, group, bias, epilogue_bias=epilogue_bias, return_gathered=return_gathered, backend=backend
        )
    inside = None
    if epilogue_bias and bias is not None:
        inside, bias = aligned(bias), None
    state = state_of(group)
    key = fast_path.key_of("all_gather_gemm", x, weight, bias, backend, transposed, return_gathered, inside, wire)
    found = fast_path.find(state, key, x, weight)
    if found is not None:
        y, gathered = found.call(x, weight) if inside is None else found.call(x, weight, inside)
        stats.count("all_gather_gemm", found.backend, found.nbytes)
        y = y if bias is None else y.add_(bias)
        return (y, gathered) if return_gathered else y
    call = OperatorCall("all_gather_gemm", x, weight, group, transposed, inside, return_gathered, wire=wire)
    check_operands(call._replace(late_bias=bias))
    tp = group.size()
    lead, received = (x.shape[0] * tp, *x.shape[1:-1]), (tp - 1) * x.numel() * x.element_size()
    if tp == 1 or without_rows(call):
        gathered = matrix(x)
        y = gemm(gathered, weight, transposed=transposed, bias=inside)
        stats.count("all_gather_gemm", "none", received)
    else:
        y, gathered = run(call, backend, key, (*lead, call.n), received)
    if bias is not None:
        y = y.add_(bias)
    y = _shaped(y, *lead, call.n)
    return (y, _shaped(gathered, *lead, call.k)) if return_gathered else y


@overload
def gemm_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    transposed: bool = False, async_op: Literal[False] = False, backend: str = "auto", wire: str = "exact",
) -> torch.Tensor: ...  # fmt: skip
@overload
def gemm_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    transposed: bool = False, async_op: Literal[True], backend: str = "auto", wire: str = "exact",
) -> Pending: ...  # fmt: skip
@overload
def gemm_reduce_scatter(
    x: Fp8Operand, weight: Fp8Operand, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    async_op: Literal[False] = False, backend: str = "auto", split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gemm_reduce_scatter(
    x: Fp8Operand, weight: Fp8Operand, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    async_op: Literal[True], backend: str = "auto", split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Pending: ...  # fmt: skip
@_without_grad
def gemm_reduce_scatter(
    x: torch.Tensor | Fp8Operand,
    weight: torch.Tensor | Fp8Operand,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    async_op: bool = False,
    backend: str = "auto",
    wire: str = "exact",
    split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | Pending:
    """Multiply and scatter the sum over ``group``: ``reduce_scatter(x @ weight.T) (+ bias)``.

    Args as of :func:`all_gather_gemm`, but

        x: ``[m, k]`` or ``[s, ..., k]`` with the first dimension divisible by ``tp``.
        bias: ``[n]``, added once, after the sum (Megatron's row-parallel bias is not sharded). Not with ``async_op``.
        async_op: return a :class:`~megatron_flux.comm.collectives.Pending` whose ``wait()`` gives the result; what is
            enqueued in between may overlap the communication.

    Returns ``[m/tp, n]`` or ``[s/tp, ..., n]``: this rank's rows of the sum. Raises as :func:`all_gather_gemm`.
    """
    group = _group(group)
    if async_op and bias is not None:
        raise UserError("gemm_reduce_scatter: bias cannot be combined with async_op; add it after wait()")
    if isinstance(x, Fp8Operand) or isinstance(weight, Fp8Operand):
        pair = _fp8("gemm_reduce_scatter", x, weight, out_dtype, split_accumulator, transposed, wire)
        return fp8_operators.gemm_and_sum("gemm_reduce_scatter", pair, group, bias, async_op=async_op, backend=backend)
    state = state_of(group)
    key = fast_path.key_of("gemm_reduce_scatter", x, weight, bias, backend, transposed, wire=wire)
    found = fast_path.find(state, key, x, weight)
    if found is not None:
        y = found.call(x, weight)
        stats.count("gemm_reduce_scatter", found.backend, found.nbytes)
        if async_op:
            return Pending(y)
        return y if bias is None else y.add_(bias)
    call = OperatorCall("gemm_reduce_scatter", x, weight, group, transposed, async_op=async_op, wire=wire)
    check_operands(call._replace(late_bias=bias))
    tp, n = group.size(), call.n
    lead, received = (x.shape[0] // tp, *x.shape[1:-1]), (tp - 1) * (call.m // tp) * n * x.element_size()
    if tp == 1 or without_rows(call):
        pending = Pending(gemm(matrix(x), weight, transposed=transposed))
        stats.count("gemm_reduce_scatter", "none", received)
    else:
        pending = run(call, backend, key, (*lead, n), received)
    if async_op:
        return pending.map(lambda t: _shaped(t, *lead, n))
    y = pending.wait()
    if bias is not None:
        y = y.add_(bias)
    return _shaped(y, *lead, n)


@overload
def gemm_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    transposed: bool = False, async_op: Literal[False] = False, backend: str = "auto",
) -> torch.Tensor: ...  # fmt: skip
@overload
def gemm_all_reduce(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    transposed: bool = False, async_op: Literal[True], backend: str = "auto",
) -> Pending: ...  # fmt: skip
@overload
def gemm_all_reduce(
    x: Fp8Operand, weight: Fp8Operand, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    async_op: Literal[False] = False, backend: str = "auto", split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor: ...  # fmt: skip
@overload
def gemm_all_reduce(
    x: Fp8Operand, weight: Fp8Operand, group: dist.ProcessGroup | None = None, *, bias: torch.Tensor | None = None,
    async_op: Literal[True], backend: str = "auto", split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Pending: ...  # fmt: skip
@_without_grad
def gemm_all_reduce(
    x: torch.Tensor | Fp8Operand,
    weight: torch.Tensor | Fp8Operand,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    async_op: bool = False,
    backend: str = "auto",
    split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor | Pending:
    """Multiply and sum over ``group``, for tensor parallelism without sequence parallelism: ``all_reduce(x @ weight.T)
    (+ bias)``.

    Args as of :func:`gemm_reduce_scatter`, but the first dimension of ``x`` ``[m, k]`` or ``[s, ..., k]`` may be any.
    Every rank gets the same bits, in every run the same. Backends that do not have the operator (``pipelined``,
    ``chunked``) run ``reference``, counted in ``stats.degraded``.

    Returns ``[m, n]`` or ``[s, ..., n]``: the whole sum. Raises as :func:`all_gather_gemm`.
    """
    group = _group(group)
    if async_op and bias is not None:
        raise UserError("gemm_all_reduce: bias cannot be combined with async_op; add it after wait()")
    if isinstance(x, Fp8Operand) or isinstance(weight, Fp8Operand):
        pair = _fp8("gemm_all_reduce", x, weight, out_dtype, split_accumulator, transposed, "exact")
        return fp8_operators.gemm_and_sum("gemm_all_reduce", pair, group, bias, async_op=async_op, backend=backend)
    state = state_of(group)
    # Beside wgrad the tuner may choose otherwise.
    kind = "gemm_all_reduce beside wgrad" if async_op else "gemm_all_reduce"
    key = fast_path.key_of(kind, x, weight, bias, backend, transposed)
    found = fast_path.find(state, key, x, weight)
    if found is not None:
        pending = found.call(x, weight)
        stats.count("gemm_all_reduce", found.backend, found.nbytes)
        if async_op:
            return pending
        y = pending.wait()
        return y if bias is None else y.add_(bias)
    call = OperatorCall("gemm_all_reduce", x, weight, group, transposed, async_op=async_op)
    check_operands(call._replace(late_bias=bias))
    tp, shape = group.size(), (*x.shape[:-1], call.n)
    received = 2 * (tp - 1) * call.m * call.n * x.element_size() // tp
    if tp == 1 or without_rows(call):
        pending = Pending(gemm(matrix(x), weight, transposed=transposed))
        stats.count("gemm_all_reduce", "none", 0)
    else:
        pending = run(call, backend, key, shape, received)
    if async_op:
        return pending.map(lambda t: _shaped(t, *shape))
    y = pending.wait()
    if bias is not None:
        y = y.add_(bias)
    return _shaped(y, *shape)


@_without_grad
def all_gather(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    backend: str = "auto",
    wire: str = "exact",
    own_rows: bool = True,
) -> Pending:
    """Start gathering ``x`` ``[s/tp, ..., k]`` to ``[s, ..., k]``; ``wait()`` on the result gives it. Used for the
    gathered input that wgrad needs: it is enqueued before dgrad, or before what comes before, so that it overlaps with
    it. The result is valid until the group's next all_gather. Without ``own_rows`` it may lack the rows of ``x``
    itself: ``own_rows`` of the result says whether it has them. Raises as :func:`all_gather_gemm`.
    """
    group = _group(group)
    state = state_of(group)
    state.gathers_begun += 1
    key = fast_path.key_of("all_gather", x, None, None, backend, return_gathered=own_rows, wire=wire)
    found = fast_path.find(state, key, x, None)
    if found is not None:
        stats.count("all_gather", found.backend, found.nbytes)
        return found.call(x)
    check_operands(OperatorCall("all_gather", x, None, group))
    tp = group.size()
    if tp == 1:
        return Pending(x)
    shape, received = (x.shape[0] * tp, *x.shape[1:]), (tp - 1) * x.numel() * x.element_size()
    call = OperatorCall("all_gather", x, None, group, return_gathered=own_rows, wire=wire)
    if without_rows(call):
        return Pending(x.new_empty(shape))
    pending = run(call, backend, key, shape, received)
    return pending.map(lambda t: _shaped(t, *shape))


def all_gathers_begun(group: dist.ProcessGroup) -> int:
    """How many :func:`all_gather` of ``group`` have begun: whether a gathered tensor is still valid."""
    return state_of(group).gathers_begun


def _fp8(operator: str, x: Any, weight: Any, out: torch.dtype, split: bool, transposed: bool, wire: str) -> Fp8Pair:
    """Both operands. Raises UserError: one is no FP8, or an option does not go with it."""
    if not (isinstance(x, Fp8Operand) and isinstance(weight, Fp8Operand)):
        raise UserError(
            f"{operator}: x is {type(x).__name__} and weight {type(weight).__name__}; both must be Fp8Operand, or none"
        )
    if transposed:
        raise UserError(
            f"{operator}: FP8 operands are [rows, k], both; leave transposed out, pass TransformerEngine's transposed "
            "data of the weight"
        )
    if wire != "exact":
        raise UserError(f"{operator}: wire={wire!r} does not go with FP8 operands; leave it out")
    return Fp8Pair(x, weight, out, split)


def _shaped(t: torch.Tensor, *shape: int) -> torch.Tensor:
    """``t`` with other dimensions, not a view of it for autograd: Megatron's cross entropy works in place on the
    output layer's result, which autograd forbids for a view made inside a custom function.
    """
    return t if t.shape == shape else _unsafe_view(t, shape)


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    if not dist.is_initialized():
        raise UserError("no process group: call torch.distributed.init_process_group first, or pass group=")
    return dist.group.WORLD
