"""Wire formats of transfers: 8-bit blocks of 128 numbers of a row, with one fp32 scale a block.

================  ===========================================================  ==========
wire format       numbers                                                      bytes each
================  ===========================================================  ==========
``exact``         as they are                                                  2 (bf16)
``int8``          rotated integers, the largest of a block at 127              1 + 1/32
================  ===========================================================  ==========

The sender multiplies a block by a Hadamard matrix and rounds; the receiver multiplies it by the same matrix. This
rotation spreads an outlier over its block, so that all of it has use of the integers' steps: a block of normal numbers
is off by 0.65 % of its norm, one with outliers by less. Unrotated integers lose 2 % beside outliers, and e4m3, which
bears them, loses 2 % of most blocks (results/wire-cpu).

The sender rounds once. Sums are added in fp32 in a fixed order, whatever arrives first, so that results are the same in
every run: exact numbers in the order of ranks; integers in the order of ranks, rotated once, then the local ones. A
block with a NaN or an infinity arrives as NaN, all of it: overflow stays visible to loss scaling. Blocks of numbers
below 1e-30 may arrive as zero.

GPUs run Triton's kernels (:mod:`megatron_flux.kernels.wire_kernels`). CPUs run torch, against which the kernels are
tested.
"""

from __future__ import annotations

import functools

import torch

from megatron_flux.kernels.wire_format import (
    EXACT,
    FORMAT,
    GROUP,
    INT8,
    TINY,
    TOP,
    LaunchCache,
    groups,
    nbytes,
    parts,
)  # fmt: skip

__all__ = ["EXACT", "INT8", "add", "decode", "encode", "nbytes", "parts"]


@functools.cache
def _hadamard() -> torch.Tensor:
    """Return the matrix of Sylvester, symmetric and of +-1: its square is 128 times the identity."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32, device="cpu")  # whatever the defaults are
    return functools.reduce(torch.kron, [two] * (GROUP.bit_length() - 1))


def encode(x: torch.Tensor, out: torch.Tensor, cache: LaunchCache) -> None:
    """Encode x ``[rows, k]`` (contiguous) in int8 into ``out`` (uint8 ``[nbytes]``)."""
    numbers, scales = parts(out, *x.shape)
    if x.is_cuda:
        from megatron_flux.kernels import wire_kernels

        wire_kernels.encode(x, numbers, scales, cache)
        return
    rows, k = x.shape
    v = torch.nn.functional.pad(x.float(), (0, groups(k) * GROUP - k)).view(rows, -1, GROUP)
    v = v @ (_hadamard() / GROUP)
    largest = v.abs().amax(-1)  # NaN where there is one
    scale = largest / TOP
    tiny = largest < TINY / GROUP
    scales.copy_(torch.where(tiny, 0.0, scale))
    scaled = (v / torch.where(tiny, 1.0, scale)[..., None]).nan_to_num(0.0).clamp(-TOP, TOP)
    numbers.copy_(scaled.round().to(FORMAT))


def decode(data: torch.Tensor, out: torch.Tensor, cache: LaunchCache) -> None:
    """Decode ``data`` into ``out`` ``[rows, k]`` (contiguous), in its dtype."""
    numbers, scales = parts(data, *out.shape)
    if out.is_cuda:
        from megatron_flux.kernels import wire_kernels

        wire_kernels.decode(numbers, scales, out, cache)
        return
    out.copy_((numbers.float() @ _hadamard() * scales[..., None]).flatten(-2)[:, : out.shape[1]])


def add(wire: str, data: torch.Tensor, local: torch.Tensor, rank: int, out: torch.Tensor, cache: LaunchCache) -> None:
    """Sum over ranks into ``out`` ``[rows, n]``, in fp32: encoded ``data`` (uint8 ``[tp, nbytes]``, rows may lie
    apart; exact: numbers ``[tp, rows, n]``), with ``local`` ``[rows, n]`` in place of ``data[rank]``. ``out`` has as
    many elements as ``local``, contiguous.
    """
    if wire == EXACT:
        numbers, scales = data, None
    else:
        numbers, scales = parts(data, *local.shape)
    if out.is_cuda:
        from megatron_flux.kernels import wire_kernels

        wire_kernels.add(numbers, scales, local, rank, out, cache)
        return
    total = torch.zeros(numbers.shape[1:], dtype=torch.float32, device=out.device)
    for source in range(data.shape[0]):
        if scales is None:
            total += (local if source == rank else numbers[source]).float()
        elif source != rank:
            total += numbers[source].float() * scales[source][..., None]
    if scales is not None:
        total = (total @ _hadamard()).flatten(-2)[:, : local.shape[1]] + local.float()
    out.copy_(total.view(out.shape))
