"""GEMMs by torch, of one rank alone: of FP8 operands cuBLASLt's where it takes them, else of dequantised numbers.

cuBLASLt reads the scales of a weight's blocks in rows of whole fours, as TransformerEngine lays them out. torch 2.11
asks for strides without that padding, and passes on the address alone; later releases ask for the true ones. Which of
both this torch wants is tried once, with a product that shows whether the numbers are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from megatron_flux.errors import OperatorError
from megatron_flux.ops.backend import shaped
from megatron_flux.ops.call import OperatorCall, aligned, matrix
from megatron_flux.ops.call_events import stats
from megatron_flux.ops.device import capability
from megatron_flux.ops.fp8_operand import FP8_CAPABILITY, Fp8Operand, Fp8Pair, blocks_of, padded, quantized

TRUE, UNPADDED = "true", "unpadded"  # strides of a weight's scales that torch is told


def gemm(x: torch.Tensor, weight: torch.Tensor, *, transposed: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T`` for x ``[..., k]`` and weight ``[n, k]``, or ``x @ weight`` for a transposed ``[k, n]``.
    ``bias`` ``[n]``, or ``[m, n]``, is added by the GEMM, before it rounds (cuBLASLt's epilogue on GPUs).
    """
    wt = weight if transposed else weight.t()
    if bias is None:
        return torch.matmul(x, wt)
    y = torch.addmm(bias, matrix(x), wt)
    return y if x.dim() == 2 else shaped(y, (*x.shape[:-1], y.shape[-1]))


def partial(call: OperatorCall) -> torch.Tensor:
    """Return the product of a rank alone ``[..., n]``, before any sum over ranks."""
    addend = None if call.addend is None else matrix(call.addend)
    if call.fp8 is not None:
        y = fp8_gemm(call.fp8, call.bias)
        return y if addend is None else y.add_(addend)
    return gemm(call.x, call.weight, transposed=call.transposed, bias=call.bias if addend is None else addend)


def gemm_only(call: OperatorCall) -> Callable[[], torch.Tensor] | None:
    """Return the GEMM of ``call`` alone on this rank's rows, as many as gathered, to measure; None: no memory."""
    x, pair, tp = call.x, call.fp8, call.group.size()
    if call.operator == "all_gather_gemm":
        try:
            if pair is None:
                x = matrix(x).repeat(tp, 1)
            else:
                pair = pair._replace(x=pair.x.repeated(tp))
        except torch.OutOfMemoryError:
            return None
    if pair is not None:
        return functools.partial(fp8_gemm, pair, call.bias)
    return functools.partial(gemm, x, call.weight, transposed=call.transposed, bias=call.bias)


def fp8_gemm(pair: Fp8Pair, bias: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T (+ bias)``, into ``out``: by cuBLASLt where it takes them, else in fp32, rounded once."""
    if pair.blocks:
        pair = pair.with_aligned_scales()
    x, weight = pair.x.one_shard(), pair.weight
    if cublas_takes(x, weight):
        by = (x.scale_inv.t(), _scales_of_weight(weight)) if pair.blocks else (x.scale_inv, weight.scale_inv)
        return torch._scaled_mm(
            aligned(x.numbers), aligned(weight.numbers).t(), scale_a=by[0], scale_b=by[1], bias=bias,
            out_dtype=pair.out, use_fast_accum=not pair.promoted, out=out,
        )  # fmt: skip
    if x.data.is_cuda:
        stats.degraded["an fp32 GEMM of dequantised FP8 operands that cuBLASLt does not take"] += 1
    y = x.dequantized() @ weight.dequantized().t()
    y = y if bias is None else y.add_(bias)
    return y.to(pair.out) if out is None else out.copy_(y)


def cublas_takes(x: Fp8Operand, weight: Fp8Operand) -> bool:
    """Return True if ``torch._scaled_mm`` takes these: k and n multiples of 16; blocks on Hopper, from CUDA 12.9, and
    rows that are a multiple of 4; a k of other than whole fours of blocks as :func:`_strides_of_odd_blocks` finds.
    """
    if not x.data.is_cuda or x.k % 16 or weight.rows % 16:
        return False
    if x.scaling == "tensor":
        return capability(x.data.device) >= FP8_CAPABILITY
    if not _multiplies_blocks(x.data.device) or x.rows != x.scale_inv.shape[1]:
        return False
    blocks = blocks_of(weight.k)
    if weight.scale_inv.shape[1] != padded(blocks):
        return False
    return blocks % 4 == 0 or _strides_of_odd_blocks(x.data.device) is not None


@functools.cache
def _multiplies_blocks(device: torch.device) -> bool:
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return capability(device) == (9, 0) and cuda >= (12, 9)


def _scales_of_weight(weight: Fp8Operand, strides: str | None = None) -> torch.Tensor:
    scales, blocks = weight.scale_inv, blocks_of(weight.k)
    if blocks % 4 and (strides or _strides_of_odd_blocks(scales.device)) == UNPADDED:
        scales = scales.as_strided((scales.shape[0], blocks), (blocks, 1))
    return scales.t()[:blocks]


@functools.cache
def _strides_of_odd_blocks(device: torch.device) -> str | None:
    """Return the strides that torch expects for weights whose blocks of k are no multiple of 4. None: it refuses them.
    Raises OperatorError: not known yet in a CUDA graph, where nothing can be tried.
    """
    if torch.cuda.is_current_stream_capturing():
        raise OperatorError("the first product of FP8 blocks with such a k cannot be in a CUDA graph: make one before")
    with torch.random.fork_rng(devices=[device]):
        by_block = torch.exp2(torch.arange(3.0, device=device)).repeat_interleave(128)
        x = quantized(torch.randn(128, 384, device=device), "1x128")
        weight = quantized(torch.randn(256, 384, device=device) * by_block, "128x128")
    want = x.dequantized() @ weight.dequantized().t()
    for strides in (TRUE, UNPADDED):
        try:
            y = torch._scaled_mm(
                x.numbers, weight.numbers.t(), scale_a=x.scale_inv.t(), scale_b=_scales_of_weight(weight, strides),
                out_dtype=torch.bfloat16, use_fast_accum=False,
            )  # fmt: skip
        except RuntimeError:
            continue
        if (y.float() - want).norm() < 1e-2 * want.norm():
            return strides
    return None
