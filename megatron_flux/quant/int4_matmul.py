"""Weights of 4 bits on torch's own kernels: ``x @ W`` with ``W`` unpacked inside the GEMM, made for few rows of ``x``.

torch's weights are ``(q - 8) * scale + zero`` with a scale and a zero for ``group_size`` rows that stand beside each
other, both bf16. GPTQ's ``(q - z) * scale`` is that with ``zero = (8 - z) * scale``, of a linear whose rows are sorted
by group: then the input is gathered by :meth:`GPTQLinear.order` first, which is nothing where they stand so already.

=========  ============================================  =================================================
device     kernels (torch 2.11 to 2.15)                  limits
=========  ============================================  =================================================
CUDA       ``_weight_int4pack_mm`` (tinygemm), bf16      n a multiple of 8, k of 32, capability 8.0
CPU        ``_weight_int4pack_mm_for_cpu``               n a multiple of 16, k of 2
=========  ============================================  =================================================

Groups are 32, 64, 128 or 256 rows. Both are rounded to bf16, so a weight is within 1/16 of its scale of GPTQ's, and
where the zero point is 8 (symmetric) within 2^-8 of its own size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_flux.errors import UserError
from megatron_flux.quant.gptq import GPTQLinear

GROUPS = (32, 64, 128, 256)
INNER_K_TILES = (8, 4, 2)
"""Of 16 rows each, that one CUDA thread block's step reads; more are faster where they divide k."""
CAPABILITY = (8, 0)


@dataclass(frozen=True, eq=False)
class Int4Linear:
    """A linear that torch's kernels take: ``y = x[:, order] @ W + bias``.

    ``packed`` is in torch's own layout, ``scales_and_zeros`` bf16 ``[groups, n, 2]``; ``order`` int64 ``[k]``, or None
    where rows stand sorted.
    """

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor
    order: torch.Tensor | None
    bias: torch.Tensor | None
    group_size: int
    n: int
    k: int

    def __call__(self, x: torch.Tensor, *, ordered: bool = False) -> torch.Tensor:
        """``y`` bf16 ``[m, n]`` of ``x`` bf16 ``[m, k]``; ``ordered``: somebody has gathered it by ``order``."""
        x = x.index_select(1, self.order) if self.order is not None and not ordered else x.contiguous()
        multiply = torch.ops.aten._weight_int4pack_mm if x.is_cuda else torch.ops.aten._weight_int4pack_mm_for_cpu
        y = multiply(x, self.packed, self.group_size, self.scales_and_zeros)
        return y if self.bias is None else y + self.bias


def int4_linear(linear: GPTQLinear, device: torch.device | str = "cpu") -> Int4Linear:
    """``linear`` for torch's kernels on ``device``.

    Raises UserError: what torch's layout cannot hold, by name, with what it can.
    """
    device = torch.device(device)
    size = linear.group_size
    on_gpu = device.type == "cuda"
    columns, rows = (8, 32) if on_gpu else (16, 2)
    for wrong, said in (
        (linear.bits != 4, f"{linear.bits} bits; the matmul has 4"),
        (size not in GROUPS, f"groups of {size or 'several sizes'}; can be {', '.join(map(str, GROUPS))} rows"),
        (linear.n % columns, f"n = {linear.n}; on {device.type} it must be a multiple of {columns}"),
        (linear.k % rows, f"k = {linear.k}; on {device.type} it must be a multiple of {rows}"),
        (
            on_gpu and torch.cuda.get_device_capability(device) < CAPABILITY,
            f"{device} is older than compute capability {'.'.join(map(str, CAPABILITY))}",
        ),
    ):
        if wrong:
            raise UserError(f"{linear.name} cannot run as int4: {said}")
    order = linear.order()
    sorted_already = bool((order.diff() == 1).all())
    linear, order = linear.to(device), order.to(device)
    numbers = linear.integers()
    if not sorted_already:
        numbers = numbers[order]
    if on_gpu:
        tiles = next(tiles for tiles in INNER_K_TILES if linear.k % (16 * tiles) == 0)
        numbers = (numbers[::2] << 4) | numbers[1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(numbers.t().contiguous(), tiles)
    else:
        numbers = numbers.t().contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.to(torch.int32), 1)
    scales = linear.scales.float()
    zeros = (8 - linear.zeros().float()) * scales
    return Int4Linear(
        packed=packed,
        scales_and_zeros=torch.stack([scales, zeros], -1).to(torch.bfloat16).contiguous(),
        order=None if sorted_already else order,
        bias=None if linear.bias is None else linear.bias.to(torch.bfloat16),
        group_size=size,
        n=linear.n,
        k=linear.k,
    )
