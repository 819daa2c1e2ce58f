"""Transpose the local shard of bytes into its place in a gathered matrix, for wgrad in FP8.

Operands of an FP8 GEMM are k-major, so wgrad multiplies transposed copies. Each rank transposes its own rows, straight
into the memory that the copy engine sends them from (:func:`comm.copy_engine.pushes_in_place`). So nothing is
transposed behind the gather, a rank transposes one shard of ``tp``, and the local one needs no copy within the GPU.

Measured in layers (two H100s, results/fp8-own-rows): transposing all of ``[32768, 4096]`` behind the gather took
0.093 ms. This kernel moves half of those bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_flux.kernels import launch as kernel_launch

BLOCK = 128  # rows and columns of a CTA; with 64 columns it takes 15 % longer (results/fp8-own-rows)


@triton.jit
def transpose_kernel(x, out, m, k, apart, BLOCK: tl.constexpr):
    """Write ``x[m, k]`` to ``out[k, m]``, whose rows begin ``apart`` bytes after each other."""
    blocks = tl.cdiv(m, BLOCK)
    at = tl.program_id(0)
    row = at % blocks * BLOCK + tl.arange(0, BLOCK)
    column = at // blocks * BLOCK + tl.arange(0, BLOCK)
    inside = (row < m)[:, None] & (column < k)[None, :]
    block = tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=inside)
    to = out + column.to(tl.int64)[:, None] * apart + row[None, :]
    tl.store(to, tl.trans(block), mask=tl.trans(inside))


def transpose(x: torch.Tensor, out: torch.Tensor, cache: dict[Any, Any]) -> None:
    """Transpose bytes ``x`` ``[m, k]`` into ``out`` ``[k, m]``, whose rows may lie apart.

    ``cache`` keeps launches; see :func:`~megatron_flux.kernels.launch.launch`.
    """
    (m, k), apart = x.shape, out.stride(0)
    aligned = x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0  # else Triton compiles another variant
    grid = triton.cdiv(m, BLOCK) * triton.cdiv(k, BLOCK)
    key, constants = ("transpose", m, k, apart, *aligned), {"BLOCK": BLOCK, "num_warps": 4}
    arguments, operands = (x, out, m, k, apart), {"x": x, "out": out}
    kernel_launch.launch(cache, key, transpose_kernel, grid, arguments, constants, operands, x.device)
