"""What a fused call is made of, for the launches of both kinds of kernels; which kind can run it. Imports triton."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from megatron_flux.comm.copy_engine import view
from megatron_flux.comm.slab import Slab, Turn
from megatron_flux.errors import UserError
from megatron_flux.ops.checks import ALIGNMENT
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.settings import sm_margin

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Triton's and Gluon's."""
CPU_CTAS = 3


@dataclass(slots=True)
class Call:
    """One call of an operator on a slab."""

    x: torch.Tensor
    weight: torch.Tensor
    """``[n, k]``, or ``[k, n]`` if ``transposed``; contiguous, like x."""
    out: torch.Tensor
    """The result, allocated."""
    work: Slab
    turn: Turn
    config: KernelConfig
    sms: int
    transposed: bool
    bias: torch.Tensor | None = None
    return_gathered: bool = True

    def constants(self) -> dict[str, Any]:
        """The constants that all kernels have."""
        config = self.config
        return {
            "TP": self.work.tp,
            "BM": config.bm,
            "BN": config.bn,
            "BK": config.bk,
            "CTAS": self.sms,
            "TRANSPOSED": self.transposed,
            "DTYPE": DTYPES[self.x.dtype],
        }

    def weight_box(self) -> tuple[int, int]:
        """Rows and columns of the weight that a tile multiplies at a time."""
        bn, bk = self.config.bn, self.config.bk
        return (bk, bn) if self.transposed else (bn, bk)

    def workspaces(self) -> list[torch.Tensor]:
        """The partials of a gemm_reduce_scatter on every rank: both halves, ``[rows, bn]``."""
        work, bn, dtype = self.work, self.config.bn, self.x.dtype
        rows = 2 * work.half_bytes // (bn * dtype.itemsize)
        key = ("partials", bn, dtype)
        return view(work.descriptors, key, lambda: [data.view(dtype).view(rows, bn) for data in work.data])


@functools.cache
def sm_count(device: torch.device) -> int:
    """CTAs a persistent kernel may have; a handful on CPUs.

    Raises:
        UserError: MEGATRON_FLUX_SM_MARGIN leaves too few.
    """
    if device.type != "cuda":
        return CPU_CTAS
    count, margin = torch.cuda.get_device_properties(device).multi_processor_count, sm_margin()
    if count - margin < CPU_CTAS:
        raise UserError(f"MEGATRON_FLUX_SM_MARGIN={margin} leaves too few of this GPU's {count} SMs; set less")
    return count - margin


def hopper_kernels(operator: str, x: torch.Tensor, n: int, bm: int = 128) -> bool:
    """Whether the warp-specialised kernels can run a call; nothing else decides it.

    They are for Hopper (not what came later) and operands that TMA can address. Those of all_gather_gemm take whole
    tiles of ``bm`` rows of a shard.

    Args:
        operator: its name.
        x: ``[..., k]``.
        n: columns of the result.
        bm: rows of a tile.
    """
    k = x.shape[-1]
    whole_tiles = operator != "all_gather_gemm" or x.numel() // k % bm == 0
    return x.is_cuda and _capability(x.device) == (9, 0) and uses_tma(x, n, k) and whole_tiles


def uses_tma(x: torch.Tensor, n: int, k: int) -> bool:
    """Whether TMA can address aligned operands: Hopper, rows of whole 16 bytes."""
    size = x.element_size()
    return _has_tma(x.device) and n * size % ALIGNMENT == 0 and k * size % ALIGNMENT == 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    if device.type != "cuda":
        return os.environ.get("MEGATRON_FLUX_TWIN_TMA", "1") == "1"
    return _capability(device) >= (9, 0)
