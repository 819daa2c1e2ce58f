"""The operators on FP8 operands; :mod:`megatron_flux.ops.operators` hands them here.

Shapes are those of bf16, results ``out_dtype``. What travels: of an all-gather the bytes of x, and the scales of its
blocks; one scale for all is the same on all ranks, as TransformerEngine has it. Of a reduce-scatter partial sums in
``out_dtype``. Operands are k-major, ``[rows, k]``, both: for dgrad the weight is TransformerEngine's transposed data.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.errors import UserError
from megatron_flux.ops import call_events
from megatron_flux.ops.backends.reference import fp8_gemm
from megatron_flux.ops.backends.registry import select
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.checks import OperatorCall, aligned
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair

_PAIRS = {"tensor": "tensor", "1x128": "128x128"}
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def all_gather_gemm(
    pair: Fp8Pair,
    group: dist.ProcessGroup,
    bias: torch.Tensor | None,
    *,
    epilogue_bias: bool,
    return_gathered: bool,
    backend: str,
) -> torch.Tensor | tuple[torch.Tensor, Fp8Operand]:
    """``[m, n]``, with ``return_gathered`` also the gathered x, of ``tp`` shards. Raises as the public operator."""
    x, tp = pair.x, group.size()
    inside = aligned(bias) if epilogue_bias and bias is not None else None
    call = OperatorCall(
        "all_gather_gemm", x.numbers, pair.weight.numbers, group, bias=inside, return_gathered=return_gathered, fp8=pair
    )
    _check(call, pair, bias)
    sent = x.data.numel() + (4 * x.scale_inv.numel() if pair.blocks else 0)
    if tp == 1:
        y, gathered = fp8_gemm(pair, inside), x
        stats.count(call.operator, "none", 0)
    else:
        y, gathered = _run(call, backend, (tp - 1) * sent)
    if bias is not None and inside is None:
        y = y.add_(bias)
    return (y, gathered) if return_gathered else y


def gemm_reduce_scatter(
    pair: Fp8Pair, group: dist.ProcessGroup, bias: torch.Tensor | None, *, async_op: bool, backend: str
) -> torch.Tensor | Pending:
    """``[m/tp, n]``, pending with ``async_op``. Raises as the public operator."""
    tp = group.size()
    call = OperatorCall("gemm_reduce_scatter", pair.x.numbers, pair.weight.numbers, group, async_op=async_op, fp8=pair)
    _check(call, pair, bias)
    if tp == 1:
        pending = Pending(fp8_gemm(pair, None))
        stats.count(call.operator, "none", 0)
    else:
        pending = _run(call, backend, (tp - 1) * (call.m // tp) * call.n * pair.out.itemsize)
    if async_op:
        return pending
    y = pending.wait()
    return y if bias is None else y.add_(bias)


def _run(call: OperatorCall, backend: str, nbytes: int) -> Any:
    chosen = select(backend, call.x, call.weight, call.group)
    result = call_events.run(call, chosen)
    stats.count(call.operator, chosen.name, nbytes)
    return result


def _check(call: OperatorCall, pair: Fp8Pair, bias: torch.Tensor | None) -> None:
    """Whether operands fit each other. Raises UserError: they do not."""
    operator, x, weight = call.operator, pair.x, pair.weight
    if x.k != weight.k:
        raise UserError(f"{operator}: x [{x.rows}, {x.k}] and weight [{weight.rows}, {weight.k}] have different k")
    if weight.scaling != _PAIRS.get(x.scaling):
        wanted = " or ".join(f"{one} with {other}" for one, other in _PAIRS.items())
        raise UserError(f"{operator}: x scaled {x.scaling} with weight scaled {weight.scaling}; use {wanted}")
    if x.shards != 1 or weight.shards != 1:
        raise UserError(f"{operator}: x of {x.shards} shards and weight of {weight.shards}; each must be one")
    if x.dtype == weight.dtype == torch.float8_e5m2:
        raise UserError(f"{operator}: x and weight are both float8_e5m2; one must be float8_e4m3fn")
    if x.data.device != weight.data.device:
        raise UserError(f"{operator}: x is on {x.data.device} and weight on {weight.data.device}; move them together")
    if pair.out not in _RESULTS:
        raise UserError(f"{operator}: out_dtype must be one of {[str(d) for d in _RESULTS]}, got {pair.out}")
    if bias is not None and (bias.shape != (call.n,) or bias.dtype != pair.out or bias.device != x.data.device):
        raise UserError(
            f"{operator}: bias must be [{call.n}] {pair.out} on {x.data.device}, got {list(bias.shape)} {bias.dtype} "
            f"on {bias.device}"
        )
    if operator == "gemm_reduce_scatter" and x.rows % (tp := call.group.size()):
        raise UserError(f"{operator}: {x.rows} rows of x must be divisible by the group size {tp}; pad the sequence")
