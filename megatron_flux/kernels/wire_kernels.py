"""Triton kernels for :mod:`megatron_flux.kernels.wire`: a program takes some blocks of 128 numbers, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_flux.kernels import launch as kernel_launch
from megatron_flux.kernels.wire_format import GROUP, TINY, TOP, LaunchCache

BLOCKS = 16  # of a program


@triton.jit
def _places(rows, k, groups, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Return the indices of a program's blocks and of its numbers, each with the mask of those in range."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < rows * groups
    column = (block % groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return block, there, (block // groups)[:, None] * k + column, there[:, None] & (column < k)


@triton.jit
def encode_kernel(
    x, numbers, scales, rows, k, groups,
    TOP: tl.constexpr, TINY: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Encode x ``[rows, k]``."""
    block, there, place, inside = _places(rows, k, groups, BLOCKS, GROUP)
    v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(v), 1)
    largest = tl.where(tl.max((v != v).to(tl.int32), 1) > 0, float("nan"), largest)
    scale = largest / TOP
    tiny = largest < TINY
    tl.store(scales + block, tl.where(tiny, 0.0, scale), mask=there)
    scaled = v / tl.where(tiny, 1.0, scale)[:, None]
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -TOP), TOP)
    tl.store(numbers + place, scaled.to(numbers.dtype.element_ty), mask=inside)


@triton.jit
def decode_kernel(numbers, scales, x, rows, k, groups, BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Decode into x ``[rows, k]``."""
    block, there, place, inside = _places(rows, k, groups, BLOCKS, GROUP)
    scale = tl.load(scales + block, mask=there, other=0.0)
    v = tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(x + place, v.to(x.dtype.element_ty), mask=inside)


@triton.jit
def add_kernel(
    numbers, scales, local, y, rank, apart, scales_apart, rows, k, groups,
    TP: tl.constexpr, SCALED: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sum over ranks, whose numbers begin ``apart`` numbers from each other, their scales ``scales_apart``."""
    block, there, place, inside = _places(rows, k, groups, BLOCKS, GROUP)
    total = tl.zeros((BLOCKS, GROUP), dtype=tl.float32)
    for source in tl.static_range(TP):
        if source == rank:
            total += tl.load(local + place, mask=inside, other=0.0).to(tl.float32)
        else:
            v = tl.load(numbers + tl.full((), source, tl.int64) * apart + place, mask=inside, other=0.0).to(tl.float32)
            if SCALED:
                v *= tl.load(scales + source * scales_apart + block, mask=there, other=0.0)[:, None]
            total += v
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


def _launch(
    kernel: Any, cache: LaunchCache, key: tuple[Any, ...], operands: dict[str, Any], *more: Any, **options: Any
) -> None:
    """Launch on the current stream; ``operands`` by the kernel's names for them, ``more``: integers."""
    rows, k = more[-3], more[-2]
    grid = -(-rows * more[-1] // BLOCKS)
    arguments = (*operands.values(), *more)

    aligned = all(operand.data_ptr() % 16 == 0 for operand in operands.values())  # else Triton compiles another variant
    name = (kernel.__name__, rows, k, aligned, *key, *more, *(operand.dtype for operand in operands.values()))
    constants = {**options, "BLOCKS": BLOCKS, "GROUP": GROUP, "num_warps": 4}
    device = next(iter(operands.values())).device
    kernel_launch.launch(cache, name, kernel, grid, arguments, constants, operands, device)


def encode(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, cache: LaunchCache) -> None:
    """See :func:`megatron_flux.kernels.wire.encode`."""
    _launch(
        encode_kernel, cache, (), {"x": x, "numbers": numbers, "scales": scales}, *x.shape, scales.shape[-1],
        TOP=TOP, TINY=TINY,
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
