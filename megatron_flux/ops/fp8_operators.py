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
from megatron_flux.ops import fast_path
from megatron_flux.ops.backends.registry import run
from megatron_flux.ops.call import OperatorCall, aligned, check_operands, without_rows
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair
from megatron_flux.ops.gemm import fp8_gemm


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
    check_operands(call._replace(late_bias=bias))
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
        check_operands(call._replace(late_bias=bias))
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
