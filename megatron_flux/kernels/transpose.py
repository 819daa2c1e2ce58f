"""Transpose the local shard of bytes into its place in a gathered matrix, for wgrad in FP8.

Operands of an FP8 GEMM are k-major, so wgrad multiplies transposed copies. Each rank transposes its own rows, straight
into the memory that the copy engine sends them from (:func:`comm.copy_engine.push_in_place`). So nothing is
transposed behind the gather, a rank transposes one shard of ``tp``, and the local one needs no copy within the GPU.
Where the library has quantised columns, which are the transposed rows, they are copied to the same place.

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
def transpose_kernel(x, out, m, k, apart, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``x[m, k]``, with ``COLUMNS`` ``x[k, m]``, to ``out[k, m]``, whose rows begin ``apart`` bytes after each
    other.
    """
    blocks = tl.cdiv(m, BLOCK)
    at = tl.program_id(0)
    row = at % blocks * BLOCK + tl.arange(0, BLOCK)
    column = at // blocks * BLOCK + tl.arange(0, BLOCK)
    to = out + column.to(tl.int64)[:, None] * apart + row[None, :]
    inside = (column < k)[:, None] & (row < m)[None, :]
    if COLUMNS:
        block = tl.load(x + column.to(tl.int64)[:, None] * m + row[None, :], mask=inside)
    else:
        block = tl.trans(tl.load(x + row.to(tl.int64)[:, None] * k + column[None, :], mask=tl.trans(inside)))
    tl.store(to, block, mask=inside)


def transpose_constants(*, columns: bool) -> dict[str, Any]:
    """Return the kernel's constants; ``columns`` as in :func:`transpose`."""
    return {"COLUMNS": columns, "BLOCK": BLOCK, "num_warps": 4}


def transpose(x: torch.Tensor, out: torch.Tensor, cache: dict[Any, Any], *, columns: bool = False) -> None:
    """Transpose bytes ``x`` ``[m, k]`` into ``out`` ``[k, m]``, whose rows may lie apart; ``columns``: ``x`` is
    ``[k, m]`` already.

    ``cache`` keeps launches; see :func:`~megatron_flux.kernels.launch.launch`.
    """
    (k, m), apart = out.shape, out.stride(0)
    aligned = x.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0  # else Triton compiles another variant
    grid = -(-m // BLOCK) * -(-k // BLOCK)  # Triton's own cdiv takes 3 us
    key = ("transpose", k, columns, *aligned, kernel_launch.specialised(m), kernel_launch.specialised(apart))
    if not (again := cache.get(key)) or kernel_launch.hooked():
        arguments, constants = (x, out, m, k, apart), transpose_constants(columns=columns)
        kernel_launch.launch(cache, key, transpose_kernel, grid, arguments, constants, {"x": x, "out": out}, x.device)
        return
    if (rows := cache.get((key, m, apart))) is None:
        rows = cache[key, m, apart] = again.rows({"m": m, "apart": apart}, grid)
    again(torch._C._cuda_getCurrentRawStream(x.device.index), rows, x, out)
