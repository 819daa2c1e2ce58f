"""The operators on FP8 operands; :mod:`megatron_flux.ops.operators` hands them here.

Shapes are those of bf16, results ``out_dtype``. What travels: of an all-gather the bytes of x, and the scales of its
blocks; one scale for all is the same on all ranks, as TransformerEngine has it. Of a reduce-scatter partial sums in
``out_dtype``. Operands are k-major, ``[rows, k]``, both: for dgrad the weight is TransformerEngine's transposed data.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.errors import UserError
from megatron_flux.ops import fast_path
from megatron_flux.ops.backends.registry import run
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.checks import OperatorCall, aligned, without_rows
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair
from megatron_flux.ops.gemm import fp8_gemm

_PAIRS = {"tensor": "tensor", "1x128": "128x128"}
_RESULTS = (torch.bfloat16, torch.float16)


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
    inside = None
    if epilogue_bias and bias is not None:
        inside, bias = aligned(bias), None
    key = fast_path.key_of_fp8("all_gather_gemm", pair, bias, backend, return_gathered=return_gathered, inside=inside)
    found, operands = _found(key, pair, group, inside)
    if found is not None:
        y, gathered = found.call(*operands)
        stats.count("all_gather_gemm", found.backend, found.nbytes)
        y = y if bias is None else y.add_(bias)
        if return_gathered and not pair.blocks:
            gathered = Fp8Operand(gathered.view(torch.uint8), x.dtype, x.scale_inv, x.scaling, tp)
        return (y, gathered) if return_gathered else y
    call = OperatorCall(
        "all_gather_gemm", x.numbers, pair.weight.numbers, group, bias=inside, return_gathered=return_gathered, fp8=pair
    )
    _check(call, pair, bias if inside is None else inside)
    sent = x.data.numel() + (4 * x.scale_inv.numel() if pair.blocks else 0)
    if tp == 1 or without_rows(call):
        y, gathered = fp8_gemm(pair, inside), x if tp == 1 else x.repeated(tp)
        stats.count(call.operator, "none", 0)
    else:
        y, gathered = run(call, backend, key, (call.m, call.n), (tp - 1) * sent)
    if bias is not None:
        y = y.add_(bias)
    return (y, gathered) if return_gathered else y


def gemm_and_sum(
    operator: str, pair: Fp8Pair, group: dist.ProcessGroup, bias: torch.Tensor | None, *, async_op: bool, backend: str
) -> torch.Tensor | Pending:
    """Of gemm_reduce_scatter ``[m/tp, n]``, of gemm_all_reduce ``[m, n]``; pending with ``async_op``. Raises as the
    public operator. The latter is not prepared.
    """
    tp, scatters = group.size(), operator == "gemm_reduce_scatter"
    key = fast_path.key_of_fp8(operator, pair, bias, backend) if scatters else None
    found, operands = _found(key, pair, group, None)
    if found is not None:
        pending = Pending(found.call(*operands))
        stats.count(operator, found.backend, found.nbytes)
    else:
        call = OperatorCall(operator, pair.x.numbers, pair.weight.numbers, group, async_op=async_op, fp8=pair)
        _check(call, pair, bias)
        if tp == 1 or without_rows(call):
            pending = Pending(fp8_gemm(pair))
            stats.count(operator, "none", 0)
        else:
            received = (1 if scatters else 2) * (tp - 1) * call.m * call.n * pair.out.itemsize // tp
            pending = run(call, backend, key, (call.m // tp if scatters else call.m, call.n), received)
    if async_op:
        return pending
    y = pending.wait()
    return y if bias is None else y.add_(bias)


def _found(
    key: Hashable | None, pair: Fp8Pair, group: dist.ProcessGroup, inside: torch.Tensor | None
) -> tuple[fast_path.Entry | None, tuple[torch.Tensor, ...]]:
    """The prepared call, if it can be used now, and what it takes."""
    if key is None:
        return None, ()
    x, weight, scales = pair.x.numbers, pair.weight.numbers, (pair.x.scale_inv, pair.weight.scale_inv)
    found = fast_path.find(state_of(group), key, x, weight, scales)
    return found, (x, weight, *scales) if inside is None else (x, weight, inside, *scales)


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
