"""Wire formats of transfers: 8-bit blocks of 128 numbers of a row, with one fp32 scale a block.

================  ===========================================================  ==========
wire format       numbers                                                      bytes each
================  ===========================================================  ==========
``exact``         as they are                                                  2 (bf16)
``fp8``           e4m3, the largest of a block at 448                          1 + 1/32
================  ===========================================================  ==========

The sender quantises once. Sums are added in fp32, in the order of ranks whatever arrives first, so that results are the
same in every run. A block with a NaN or an infinity arrives as NaN, all of it: overflow stays visible to loss scaling.
Numbers below 1e-30 arrive as zero.

GPUs run Triton's kernels (:mod:`megatron_flux.kernels.wire_kernels`); fp8 needs compute capability 8.9. CPUs run torch,
against which the kernels are tested.
"""

from __future__ import annotations

import torch

from megatron_flux.kernels.wire_format import (
    EXACT,
    FORMAT,
    FP8,
    GROUP,
    TINY,
    TOP,
    LaunchCache,
    groups,
    nbytes,
    parts,
)  # fmt: skip

__all__ = ["EXACT", "FP8", "add", "decode", "encode", "nbytes", "parts"]


def encode(x: torch.Tensor, out: torch.Tensor, cache: LaunchCache) -> None:
    """Encode x ``[rows, k]`` (contiguous) in fp8 into ``out`` (uint8 ``[nbytes]``)."""
    numbers, scales = parts(out, *x.shape)
    if x.is_cuda:
        from megatron_flux.kernels import wire_kernels

        wire_kernels.encode(x, numbers, scales, cache)
        return
    rows, k = x.shape
    v = torch.nn.functional.pad(x.float(), (0, groups(k) * GROUP - k)).view(rows, -1, GROUP)
    largest = v.abs().amax(-1)  # NaN where there is one
    scale = largest / TOP
    tiny = largest < TINY
    scales.copy_(torch.where(tiny, 0.0, scale))
    scaled = (v / torch.where(tiny, 1.0, scale)[..., None]).nan_to_num(0.0).clamp(-TOP, TOP)
    numbers.copy_(scaled.view(rows, -1)[:, :k].to(FORMAT))


def decode(data: torch.Tensor, out: torch.Tensor, cache: LaunchCache) -> None:
    """Decode ``data`` into ``out`` ``[rows, k]`` (contiguous), in its dtype."""
    numbers, scales = parts(data, *out.shape)
    if out.is_cuda:
        from megatron_flux.kernels import wire_kernels

        wire_kernels.decode(numbers, scales, out, cache)
        return
    out.copy_(_numbers(numbers, scales))


def _numbers(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers.float() * scales.repeat_interleave(GROUP, -1)[..., : numbers.shape[-1]]


def add(wire: str, data: torch.Tensor, local: torch.Tensor, rank: int, out: torch.Tensor, cache: LaunchCache) -> None:
    """Sum over ranks into ``out`` ``[rows, n]``, in fp32 and in the order of ranks: encoded ``data`` (uint8 ``[tp,
    nbytes]``, rows may lie apart), with ``local`` ``[rows, n]`` in place of ``data[rank]``.
    """
    if wire == EXACT:
        numbers, scales = data.view(local.dtype).unflatten(-1, tuple(local.shape)), None
    else:
        numbers, scales = parts(data, *local.shape)
    if out.is_cuda:
        from megatron_flux.kernels import wire_kernels

        wire_kernels.add(numbers, scales, local, rank, out, cache)
        return
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for source in range(data.shape[0]):
        if source == rank:
            total += local.float()
        else:
            total += numbers[source].float() if scales is None else _numbers(numbers[source], scales[source])
    out.copy_(total)
