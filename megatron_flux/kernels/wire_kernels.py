"""Triton kernels for :mod:`megatron_flux.kernels.wire`: a program takes some blocks of 128 numbers, in fp32.

Rotations are products on the tensor cores, whose factors of 16 bits times +-1 or +-1/128 are exact. fp32 is rotated as
the sum of two such factors. Peers' integers are added before they are rotated: one rotation serves all of them.

Programs that rotate are large because each makes the matrix anew: encoding bf16 takes 33 instructions a number with 128
blocks and 53 with 32 (counted for compute capability 8.0; 29 and 52 for 9.0). The loop over ranks in ``add_kernel`` is
not unrolled: the compiler would convert every rank's numbers for the tensor cores, and spill registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_flux.kernels import launch as kernel_launch
from megatron_flux.kernels.wire_format import GROUP, TINY, TOP, LaunchCache

ROTATING, ADDING = (128, 8), (16, 4)
"""Blocks and warps of a program that rotates, and of one that adds exact numbers."""
ROUND = 12582912.0  # 1.5 * 2**23: the lowest byte of a sum with it is the other addend, rounded to the nearest integer


@triton.jit
def _places(rows, k, groups, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Return the indices of a program's blocks and of its numbers in x, each with the mask of those in range."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < rows * groups
    column = (block % groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return block, there, (block // groups)[:, None] * k + column, there[:, None] & (column < k)


@triton.jit
def _rotated(v, ONE: tl.constexpr, GROUP: tl.constexpr):
    """Return the blocks ``v`` times the Hadamard matrix of +-ONE, in fp32."""
    i = tl.arange(0, GROUP)
    odd = i[:, None] & i[None, :]  # entry [i, j] is negative if i and j share an odd number of bits
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    matrix = tl.where(odd & 1 != 0, -ONE, ONE)
    if v.dtype == tl.float32:  # in two parts: 16 binary digits are enough beside integers of 8
        matrix = matrix.to(tl.bfloat16)
        high = v.to(tl.bfloat16)
        low = (v - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, matrix, tl.dot(high, matrix))
    return tl.dot(v, matrix.to(v.dtype))


@triton.jit
def encode_kernel(
    x, numbers, scales, rows, k, groups,
    TOP: tl.constexpr, TINY: tl.constexpr, ROUND: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Encode x ``[rows, k]``."""
    block, there, place, inside = _places(rows, k, groups, BLOCKS, GROUP)
    v = _rotated(tl.load(x + place, mask=inside, other=0.0), 1.0 / GROUP, GROUP)
    largest = tl.max(tl.abs(v), 1)  # not finite if one of x is not: the rotation brings it into all of v
    scale = largest / TOP
    tiny = largest < TINY / GROUP
    tl.store(scales + block, tl.where(tiny, 0.0, scale), mask=there)
    scaled = v / tl.where(tiny, 1.0, scale)[:, None]
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -TOP), TOP)
    at = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    bits = (scaled + ROUND).to(tl.int32, bitcast=True)
    tl.store(numbers + at, bits.to(tl.int8), mask=there[:, None])


@triton.jit
def _loaded(numbers, scales, block, mask, GROUP: tl.constexpr):
    """Return blocks of integers in bf16, which has them all, and their scales."""
    at = block[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scale = tl.load(scales + block, mask=mask, other=0.0)
    return tl.load(numbers + at, mask=mask[:, None], other=0).to(tl.bfloat16), scale[:, None]


@triton.jit
def decode_kernel(numbers, scales, x, rows, k, groups, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Decode into x ``[rows, k]``."""
    block, there, place, inside = _places(rows, k, groups, BLOCKS, GROUP)
    v, scale = _loaded(numbers, scales, block, there, GROUP)
    tl.store(x + place, (_rotated(v, 1.0, GROUP) * scale).to(x.dtype.element_ty), mask=inside)


@triton.jit
def add_kernel(
    numbers, scales, local, y, rank, apart, scales_apart, rows, k, groups,
    TP: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sum over ranks, whose numbers begin ``apart`` numbers from each other, their scales ``scales_apart``."""
    block, there, place, inside = _places(rows, k, groups, BLOCKS, GROUP)
    total = tl.zeros((BLOCKS, GROUP), dtype=tl.float32)
    if SCALED:
        for source in range(TP):
            theirs = numbers + tl.full((), source, tl.int64) * apart
            v, scale = _loaded(theirs, scales + source * scales_apart, block, there & (source != rank), GROUP)
            total += v.to(tl.float32) * scale
        total = _rotated(total, 1.0, GROUP) + tl.load(local + place, mask=inside, other=0.0).to(tl.float32)
    else:
        for source in tl.static_range(TP):
            if source == rank:
                total += tl.load(local + place, mask=inside, other=0.0).to(tl.float32)
            else:
                theirs = numbers + tl.full((), source, tl.int64) * apart
                total += tl.load(theirs + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


def _launch(
    kernel: Any, cache: LaunchCache, key: tuple[Any, ...], operands: dict[str, Any], *more: Any, **options: Any
) -> None:
    """Launch on the current stream; ``operands`` by the kernel's names for them, ``more``: integers."""
    rows, _, groups = more[-3:]
    blocks, warps = ROTATING if options.get("SCALED", True) else ADDING
    grid = -(-rows * groups // blocks)
    arguments = (*operands.values(), *more)

    about: list[Any] = []
    aligned = True  # else Triton compiles another variant
    for operand in operands.values():
        aligned = aligned and operand.data_ptr() % 16 == 0
        about.append(operand.dtype)
    name = (kernel.__name__, aligned, *key, *more, *about)
    constants = {**options, "BLOCKS": blocks, "GROUP": GROUP, "num_warps": warps}
    kernel_launch.launch(cache, name, kernel, grid, arguments, constants, operands, operand.device)


def encode(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, cache: LaunchCache) -> None:
    """See :func:`megatron_flux.kernels.wire.encode`."""
    _launch(
        encode_kernel, cache, (), {"x": x, "numbers": numbers, "scales": scales}, *x.shape, scales.shape[-1],
        TOP=TOP, TINY=TINY, ROUND=ROUND,
    )  # fmt: skip


def decode(numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, cache: LaunchCache) -> None:
    """See :func:`megatron_flux.kernels.wire.decode`."""
    _launch(decode_kernel, cache, (), {"numbers": numbers, "scales": scales, "x": out}, *out.shape, scales.shape[-1])


def add(
    numbers: torch.Tensor,
    scales: torch.Tensor | None,
    local: torch.Tensor,
    rank: int,
    out: torch.Tensor,
    cache: LaunchCache,
) -> None:
    """See :func:`megatron_flux.kernels.wire.add`."""
    scaled, groups = scales is not None, -(-local.shape[1] // GROUP)
    operands = {"numbers": numbers, "scales": local if scales is None else scales, "local": local, "y": out}
    _launch(
        add_kernel, cache, (scaled, numbers.shape[0]), operands, rank, numbers.stride(0),
        0 if scales is None else scales.stride(0), *local.shape, groups, TP=numbers.shape[0], SCALED=scaled,
    )  # fmt: skip
