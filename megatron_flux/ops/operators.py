"""The public operators: find the plan of a call, run it, count.

Leading dimensions: ``x`` may be ``[s, b, k]`` as in Megatron. It is read as a matrix of ``s*b`` rows, so the shards are
blocks of the first dimension, and results get their leading dimensions back with the first one multiplied
(all_gather) or divided (reduce_scatter) by ``tp``.

With ``tp`` = 1, and of no rows, operators are the GEMM alone. That no rank has rows is compared over the group, once.

The operators are not differentiable: their results never require a gradient, whatever the operands do. A gradient
through the GEMM alone would be silently wrong. :mod:`megatron_flux.layers` has the autograd.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.ops import call_events
from megatron_flux.ops.backends import registry
from megatron_flux.ops.call import OperatorCall, new_call
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair


def all_gather_gemm(
    x: torch.Tensor | Fp8Operand,
    weight: torch.Tensor | Fp8Operand,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    epilogue_bias: bool = False,
    transposed: bool = False,
    return_gathered: bool = False,
    own_gathered: bool = False,
    backend: str = "auto",
    wire: str = "exact",
    split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Gather ``x`` over ``group`` and multiply: ``all_gather(x) @ weight.T (+ bias)``.

    Args:
        x: ``[m/tp, k]`` or ``[s/tp, ..., k]``; fp32, bf16 or fp16. Or an
            :class:`~megatron_flux.ops.fp8_operand.Fp8Operand` ``[m/tp, k]``, as the weight then: both scaled as a
            whole, x alike on all ranks, or x in blocks of 1x128 and the weight of 128x128.
        weight: ``[n, k]``, or ``[k, n]`` if ``transposed``; same dtype and device as ``x``. Copied only
            where it does not begin at a multiple of 16 bytes.
        group: process group of ``tp`` ranks; None is the default group.
        bias: ``[n]``, added to every row.
        epilogue_bias: add the bias in fp32 before the result is rounded, as TransformerEngine's linears do, not to the
            rounded result as Megatron's own do: a bias that is smaller than the result's last bit is not lost.
        transposed: ``weight`` is ``[k, n]`` (Megatron's ``[out, in]`` weight in dgrad).
        return_gathered: also return the gathered ``x`` ``[m, k]`` (same leading dimensions as the result). The
            caller may keep it until its next all_gather_gemm or gemm_reduce_scatter on the same group.
        own_gathered: with ``return_gathered``, not of FP8: it is memory of the caller's own, and stays.
        backend: ``auto`` or a name from :func:`backend_names`.
        wire: wire format that the tuner may use over a ``host`` link: ``exact``, or also ``int8``. Not with FP8.
        split_accumulator: of FP8: the tensor core's sums, of 14 bits on Hopper, go to fp32 every 128 of k, as
            TransformerEngine's recipes ask for in dgrad and wgrad. Blocks always do so.
        out_dtype: of the result of FP8 operands, and of their bias: bf16 or fp16.

    Returns ``[m, n]`` or ``[s, ..., n]``; with ``return_gathered`` a pair of it and the gathered ``x``, of FP8 with
    ``tp`` shards.

    Raises:
        UserError: shapes, dtypes or devices that do not fit, or an unusable backend.
        OperatorError: the communication failed; names rank, peers and shape.
    """
    fp8 = None
    if isinstance(x, Fp8Operand) or isinstance(weight, Fp8Operand):
        fp8 = _fp8("all_gather_gemm", x, weight, out_dtype, split_accumulator, transposed, wire)
        x, weight = fp8.x.numbers, fp8.weight.numbers
    inside, late = (bias, None) if epilogue_bias else (None, bias)
    group = group or dist.group.WORLD or _no_group()
    call = new_call(
        OperatorCall,
        ("all_gather_gemm", x, weight, group, transposed, inside, return_gathered, False, wire, fp8, late, None,
         own_gathered),
    )  # fmt: skip
    y, gathered = _run(call, backend)
    if late is not None:
        y.add_(late.detach())
    return (y, gathered) if return_gathered else y


def gemm_reduce_scatter(
    x: torch.Tensor | Fp8Operand,
    weight: torch.Tensor | Fp8Operand,
    group: dist.ProcessGroup | None = None,
    *,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    transposed: bool = False,
    async_op: bool = False,
    backend: str = "auto",
    wire: str = "exact",
    split_accumulator: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """Multiply and scatter the sum over ``group``: ``reduce_scatter(x @ weight.T (+ addend)) (+ bias)``.

    Args as of :func:`all_gather_gemm`, but

        x: ``[m, k]`` or ``[s, ..., k]`` with the first dimension divisible by ``tp``.
        bias: ``[n]``, added once, after the sum (Megatron's row-parallel bias is not sharded). Not with ``async_op``.
        addend: ``[m, n]`` or ``[s, ..., n]``, another one on every rank: its sum over ranks is part of the result, and
            no more bytes travel.
        async_op: return a :class:`~megatron_flux.comm.collectives.Pending` whose ``wait()`` gives the result; what is
            enqueued in between may overlap the communication.

    Returns ``[m/tp, n]`` or ``[s/tp, ..., n]``: this rank's rows of the sum.
    Raises as :func:`all_gather_gemm`.
    """
    fp8 = None
    if isinstance(x, Fp8Operand) or isinstance(weight, Fp8Operand):
        fp8 = _fp8("gemm_reduce_scatter", x, weight, out_dtype, split_accumulator, transposed, wire)
        x, weight = fp8.x.numbers, fp8.weight.numbers
    group = group or dist.group.WORLD or _no_group()
    call = new_call(
        OperatorCall,
        ("gemm_reduce_scatter", x, weight, group, transposed, None, True, async_op, wire, fp8, bias, addend, False),
    )
    y = _run(call, backend)
    return y if bias is None and not async_op and isinstance(y, torch.Tensor) else _finish(y, call)


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
) -> Any:
    """Multiply and sum over ``group``, for tensor parallelism without sequence parallelism: ``all_reduce(x @ weight.T)
    (+ bias)``.

    Args as of :func:`gemm_reduce_scatter`, but the first dimension of ``x`` ``[m, k]`` or ``[s, ..., k]`` may be any.
    Every rank gets the same bits, in every run the same. ``chunked`` has no such operator; it runs ``reference``,
    counted in ``stats.degraded``. Returns the whole sum, ``[m, n]`` or ``[s, ..., n]``.
    Raises as :func:`all_gather_gemm`.
    """
    fp8 = None
    if isinstance(x, Fp8Operand) or isinstance(weight, Fp8Operand):
        fp8 = _fp8("gemm_all_reduce", x, weight, out_dtype, split_accumulator, transposed, "exact")
        x, weight = fp8.x.numbers, fp8.weight.numbers
    group = group or dist.group.WORLD or _no_group()
    call = new_call(
        OperatorCall,
        ("gemm_all_reduce", x, weight, group, transposed, None, True, async_op, "exact", fp8, bias, None, False),
    )
    y = _run(call, backend)
    return y if bias is None and not async_op and isinstance(y, torch.Tensor) else _finish(y, call)


def all_gather(
    x: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    backend: str = "auto",
    wire: str = "exact",
    transposed: bool = False,
    columns: bool = False,
    own_gathered: bool = False,
    held: bool = False,
) -> Pending:
    """Start gathering ``x`` ``[s/tp, ..., k]`` to ``[s, ..., k]``; ``wait()`` on the result gives it. Used for the
    gathered input that wgrad needs: it is enqueued before dgrad, or before what comes before, so that it overlaps with
    it. The result is valid until the group's next all_gather. With ``own_gathered`` it stays: it is memory of the
    caller's own.
    Raises as :func:`all_gather_gemm`.

    ``transposed``: the elements of ``x`` ``[m/tp, k/2]`` are pairs of bytes, and ``fused`` gives them as ``[k, m/2]``;
    the result's ``transposed`` says whether it did. With ``columns`` ``x`` is ``[k, m/tp/2]`` already; other backends
    know only rows. ``held``: ``fused`` begins the transfers when the result's ``send()`` is called, behind those of
    operators that were called in between, but before these are finished; and the result is valid until the next one
    that is held, whatever else is gathered. Other backends begin at once.
    """
    group = group or dist.group.WORLD or _no_group()
    if not held:
        state_of(group).gathers_begun += 1
    call = OperatorCall(
        "all_gather", x, None, group, columns, return_gathered=not transposed, async_op=held, wire=wire,
        own_gathered=own_gathered,
    )  # fmt: skip
    pending: Pending = _run(call, backend)
    return pending


def _run(call: OperatorCall, backend: str) -> Any:
    """Run ``call`` by its plan, which the first call of its spec makes, and count it."""
    if torch.is_grad_enabled():  # inside an autograd function that is not so, and costs nothing
        with torch.no_grad():
            return _run(call, backend)
    plans, key = state_of(call.group).plans, (backend, call.key)
    plan = plans.get(key)
    if plan is None:
        plan = registry.plan(call, backend)
        if not (call.x.is_cuda and torch.cuda.is_current_stream_capturing()):  # what stands in for a call in one graph
            plans[key] = plan
    result = call_events.run(call, plan) if call_events.watching else plan.run(call)
    stats.calls[plan.counted] += 1
    stats.bytes_received += plan.nbytes
    for reason in plan.degraded:
        stats.degraded[reason] += 1
    return result


def _finish(y: torch.Tensor | Pending, call: OperatorCall) -> torch.Tensor | Pending:
    if call.async_op:
        return y if isinstance(y, Pending) else Pending(y)
    if isinstance(y, Pending):
        y = y.wait()
    return y if call.late_bias is None else y.add_(call.late_bias.detach())


def _fp8(operator: str, x: Any, weight: Any, out: torch.dtype, split: bool, transposed: bool, wire: str) -> Fp8Pair:
    """Return both operands. Raises UserError: one is no FP8, or an option does not go with it."""
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


def _no_group() -> NoReturn:
    raise UserError("no process group: call torch.distributed.init_process_group first, or pass group=")
