"""The public operators: check, flatten leading dimensions, pick a backend, count.

Leading dimensions: ``x`` may be ``[s, b, k]`` as in Megatron. It is read as a matrix of ``s*b`` rows, so the shards are
blocks of the first dimension, and results get their leading dimensions back with the first one multiplied
(all_gather) or divided (reduce_scatter) by ``tp``.

With ``tp`` = 1 both operators are the GEMM alone.

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
from megatron_flux.ops import call_events
from megatron_flux.ops.backends.reference import gemm
from megatron_flux.ops.backends.registry import select
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.checks import OperatorCall, aligned
from megatron_flux.ops.fast_path import call_cache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

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
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue_bias: bool = False,
    transposed: bool = False,
    return_gathered: Literal[False] = False,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue_bias: bool = False,
    transposed: bool = False,
    return_gathered: Literal[True],
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...
@_without_grad
def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue_bias: bool = False,
    transposed: bool = False,
    return_gathered: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gather ``x`` over ``group`` and multiply: ``all_gather(x) @ weight.T (+ bias)``.

    Args:
        x: ``[m/tp, k]`` or ``[s/tp, ..., k]``; fp32, bf16 or fp16.
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

    Returns:
        ``[m, n]`` or ``[s, ..., n]``; with ``return_gathered`` a pair of it and the gathered ``x``.

    Raises:
        UserError: shapes, dtypes or devices that do not fit, or an unusable backend.
        OperatorError: the communication failed; names rank, peers and shape.
    """
    group = _group(group)
    inside = None
    if epilogue_bias and bias is not None:
        inside, bias = aligned(bias), None
    state = state_of(group)
    key = call_cache.key_of("all_gather_gemm", x, weight, bias, backend, transposed, return_gathered, inside)
    found = call_cache.find(state, key, x, weight)
    if found is not None:
        y, gathered = found.call(x, weight) if inside is None else found.call(x, weight, inside)
        stats.count("all_gather_gemm", found.backend, found.nbytes)
        y = y if bias is None else y.add_(bias)
        return (y, gathered) if return_gathered else y
    k, n = _check("all_gather_gemm", x, weight, bias if inside is None else inside, transposed)
    tp = group.size()
    x2d = _matrix(x)
    lead, received = (x.shape[0] * tp, *x.shape[1:-1]), (tp - 1) * x2d.numel() * x2d.element_size()
    if tp == 1:
        y, gathered, used = gemm(x2d, weight, transposed=transposed, bias=inside), x2d, "none"
    else:
        chosen = select(backend, x2d, weight, group)
        used = chosen.name
        with call_events.call("all_gather_gemm", chosen, x2d.shape[0] * tp, n, k, x2d, transposed, group):
            y, gathered = chosen.all_gather_gemm(
                x2d, weight, group, transposed=transposed, bias=inside, return_gathered=return_gathered
            )
        made = OperatorCall("all_gather_gemm", x, weight, group, transposed, inside, return_gathered)
        call_cache.remember(state, key, chosen, made, (*lead, n), received)
    stats.count("all_gather_gemm", used, received)
    if bias is not None:
        y = y.add_(bias)
    y = _shaped(y, *lead, n)
    return (y, _shaped(gathered, *lead, k)) if return_gathered else y


@overload
def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    async_op: Literal[False] = False,
    backend: str = "auto",
) -> torch.Tensor: ...
@overload
def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    async_op: Literal[True],
    backend: str = "auto",
) -> Pending: ...
@_without_grad
def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    async_op: bool = False,
    backend: str = "auto",
) -> torch.Tensor | Pending:
    """Multiply and scatter the sum over ``group``: ``reduce_scatter(x @ weight.T) (+ bias)``.

    Args:
        x: ``[m, k]`` or ``[s, ..., k]`` with the first dimension divisible by ``tp``; fp32, bf16 or fp16.
        weight: ``[n, k]``, or ``[k, n]`` if ``transposed``; same dtype and device as ``x``. Copied only
            where it does not begin at a multiple of 16 bytes.
        group: process group of ``tp`` ranks; None is the default group.
        bias: ``[n]``, added once, after the sum (Megatron's row-parallel bias is not sharded). Not with ``async_op``.
        transposed: ``weight`` is ``[k, n]`` (Megatron's ``[out, in]`` weight in dgrad).
        async_op: return a :class:`~megatron_flux.comm.collectives.Pending` whose ``wait()`` gives the result; what is
            enqueued in between may overlap the communication.
        backend: ``auto`` or a name from :func:`backend_names`.

    Returns:
        ``[m/tp, n]`` or ``[s/tp, ..., n]``: this rank's rows of the sum.

    Raises:
        UserError: shapes, dtypes or devices that do not fit, or an unusable backend.
        OperatorError: the communication failed; names rank, peers and shape.
    """
    group = _group(group)
    if async_op and bias is not None:
        raise UserError("gemm_reduce_scatter: bias cannot be combined with async_op; add it after wait()")
    state = state_of(group)
    key = call_cache.key_of("gemm_reduce_scatter", x, weight, bias, backend, transposed)
    found = call_cache.find(state, key, x, weight)
    if found is not None:
        y = found.call(x, weight)
        stats.count("gemm_reduce_scatter", found.backend, found.nbytes)
        if async_op:
            return Pending(y)
        return y if bias is None else y.add_(bias)
    k, n = _check("gemm_reduce_scatter", x, weight, bias, transposed)
    tp = group.size()
    if x.shape[0] % tp:
        raise UserError(
            f"gemm_reduce_scatter: the first dimension of x {tuple(x.shape)} must be divisible by the group size {tp}; "
            "pad the sequence"
        )
    x2d = _matrix(x)
    lead, received = (x.shape[0] // tp, *x.shape[1:-1]), (tp - 1) * (len(x2d) // tp) * n * x2d.element_size()
    if tp == 1:
        pending, used = Pending(gemm(x2d, weight, transposed=transposed)), "none"
    else:
        chosen = select(backend, x2d, weight, group)
        used = chosen.name
        with call_events.call("gemm_reduce_scatter", chosen, x2d.shape[0], n, k, x2d, transposed, group) as seen:
            pending = chosen.gemm_reduce_scatter(x2d, weight, group, transposed=transposed, async_op=async_op)
        pending = seen.pending(pending)
        made = OperatorCall("gemm_reduce_scatter", x, weight, group, transposed)
        call_cache.remember(state, key, chosen, made, (*lead, n), received)
    stats.count("gemm_reduce_scatter", used, received)
    if async_op:
        return pending.map(lambda t: _shaped(t, *lead, n))
    y = pending.wait()
    if bias is not None:
        y = y.add_(bias)
    return _shaped(y, *lead, n)


@_without_grad
def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None = None, *, backend: str = "auto") -> Pending:
    """Start gathering ``x`` ``[s/tp, ..., k]`` to ``[s, ..., k]``; ``wait()`` on the result gives it.

    Used for the gathered input that wgrad needs: it is enqueued before dgrad, or before what comes before, so that it
    overlaps with it. The result is valid until the group's next all_gather.

    Raises:
        UserError: a shape or dtype that is not supported, or an unusable backend.
        OperatorError: the communication failed.
    """
    group = _group(group)
    state = state_of(group)
    state.gathers_begun += 1
    key = call_cache.key_of("all_gather", x, None, None, backend)
    found = call_cache.find(state, key, x, None)
    if found is not None:
        stats.count("all_gather", found.backend, found.nbytes)
        return found.call(x)
    if x.dim() < 2 or x.dtype not in DTYPES:
        raise UserError(
            f"all_gather: x must have at least 2 dimensions and be one of {[str(d) for d in DTYPES]}, got "
            f"{tuple(x.shape)} {x.dtype}"
        )
    tp = group.size()
    if tp == 1:
        return Pending(x)
    x2d = _matrix(x)
    chosen = select(backend, x2d, None, group)
    shape, received = (x.shape[0] * tp, *x.shape[1:]), (tp - 1) * x2d.numel() * x2d.element_size()
    stats.count("all_gather", chosen.name, received)
    with call_events.call("all_gather", chosen, x2d.shape[0] * tp, 0, x2d.shape[1], x2d, False, group) as seen:
        pending = chosen.all_gather(x2d, group, async_op=True)
    call_cache.remember(state, key, chosen, OperatorCall("all_gather", x, None, group), shape, received)
    return seen.pending(pending).map(lambda t: _shaped(t, *shape))


def all_gathers_begun(group: dist.ProcessGroup) -> int:
    """How many :func:`all_gather` of ``group`` have begun: whether a gathered tensor is still valid."""
    return state_of(group).gathers_begun


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """``[..., k]`` as a contiguous ``[m, k]``, without a copy where it is one already."""
    return (x if x.is_contiguous() else x.contiguous()).view(-1, x.shape[-1])


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


def _check(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> tuple[int, int]:
    """Check the operands and return ``(k, n)``."""
    if x.dim() < 2 or weight.dim() != 2:
        raise UserError(
            f"{operator}: x must have at least 2 dimensions and weight exactly 2, got x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    rows, columns = weight.shape
    k, n = (rows, columns) if transposed else (columns, rows)
    form = "[k, n]" if transposed else "[n, k]"
    if x.shape[-1] != k:
        raise UserError(
            f"{operator}: the last dimension of x {tuple(x.shape)} must be k = {k} of weight {tuple(weight.shape)} "
            f"{form}; is transposed={transposed} meant?"
        )
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise UserError(
            f"{operator}: x and weight must both be one of {[str(d) for d in DTYPES]}, got {x.dtype} and {weight.dtype}"
        )
    if weight.device != x.device:
        raise UserError(f"{operator}: x is on {x.device} and weight on {weight.device}; move them to one device")
    if bias is not None and (bias.shape != (n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise UserError(
            f"{operator}: bias must be [{n}] {x.dtype} on {x.device}, got {list(bias.shape)} {bias.dtype} on "
            f"{bias.device}"
        )
    return k, n
