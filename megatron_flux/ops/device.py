"""What the device of a call can run: SMs for persistent kernels, TMA, and the warp-specialised kernels."""

from __future__ import annotations

import functools
import os

import torch

from megatron_flux.errors import UserError
from megatron_flux.ops.call import ALIGNMENT, OperatorCall
from megatron_flux.settings import sm_margin

CPU_CTAS = 3


@functools.cache
def sm_count(device: torch.device) -> int:
    """CTAs a persistent kernel may have; a few on CPUs. Raises UserError: MEGATRON_FLUX_SM_MARGIN leaves too few."""
    if device.type != "cuda":
        return CPU_CTAS
    count, margin = torch.cuda.get_device_properties(device).multi_processor_count, sm_margin()
    if count - margin < CPU_CTAS:
        raise UserError(f"MEGATRON_FLUX_SM_MARGIN={margin} leaves too few of this GPU's {count} SMs; set less")
    return count - margin


def hopper_kernels(call: OperatorCall, bm: int = 128) -> bool:
    """Return True if the warp-specialised kernels can run ``call``; nothing else decides it.

    They are for Hopper (not what came later) and operands that TMA can address. Those of all_gather_gemm take whole
    tiles of ``bm`` rows of a shard; of gemm_reduce_scatter, where ``x`` is in blocks, the scales of every shard begin
    at a multiple of 16 bytes.
    """
    x, k = call.x, call.k
    if not x.is_cuda or capability(x.device) != (9, 0) or not uses_tma(x, call.n, k):
        return False
    if call.operator == "all_gather_gemm":
        return x.numel() // k % bm == 0
    in_blocks = call.operator == "gemm_reduce_scatter" and call.fp8 is not None and call.fp8.blocks
    return not in_blocks or call.m // call.group.size() * 4 % ALIGNMENT == 0


def uses_tma(x: torch.Tensor, n: int, k: int) -> bool:
    """Return True if TMA can address aligned operands: Hopper, rows of whole 16 bytes."""
    size = x.element_size()
    return _has_tma(x.device) and n * size % ALIGNMENT == 0 and k * size % ALIGNMENT == 0


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    if device.type != "cuda":
        return os.environ.get("MEGATRON_FLUX_TWIN_TMA", "1") == "1"
    return capability(device) >= (9, 0)
