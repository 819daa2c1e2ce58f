"""Fused calls from the slab's turn to its end; the launches of kernels are in ``plain`` and ``hopper``. Imports triton.

Both have the same two functions, which fill the result of a :class:`SlabCall`: ``all_gather_gemm(call, gathered)`` and
``gemm_reduce_scatter(call)``.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import triton.language as tl

from megatron_flux.comm.copy_engine import WHOLE, push
from megatron_flux.comm.slab import CALL_FLAGS, Slab, Turn, kept, unbroken
from megatron_flux.errors import UserError
from megatron_flux.ops.call import ALIGNMENT, OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.kernel_config import KernelConfig, rs_tiles
from megatron_flux.settings import sm_margin

DTYPES = {  # Triton's and Gluon's
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip
CPU_CTAS = 3


@dataclass(slots=True)
class SlabCall:
    """One call of an operator on a slab."""

    made: OperatorCall  # whose operands are aligned
    out: torch.Tensor  # the result, allocated
    work: Slab
    turn: Turn
    config: KernelConfig
    sms: int

    def constants(self) -> dict[str, Any]:
        """The constants that all kernels have."""
        made, config = self.made, self.config
        tile = {"BM": config.bm, "BN": config.bn, "BK": config.bk}
        fp8 = made.fp8
        scales = None if fp8 is None else "blocks" if fp8.blocks else "tensor"
        return {
            "TP": self.work.tp, **tile, "CTAS": self.sms, "TRANSPOSED": made.transposed, "DTYPE": DTYPES[made.out],
            "SCALES": scales, "PROMOTE": fp8 is not None and fp8.promoted,
        }  # fmt: skip

    def weight_box(self) -> tuple[int, int]:
        """Rows and columns of the weight that a tile multiplies at a time."""
        bn, bk = self.config.bn, self.config.bk
        return (bk, bn) if self.made.transposed else (bn, bk)

    def workspaces(self) -> list[torch.Tensor]:
        """The partials of a gemm_reduce_scatter on every rank: both halves, ``[rows, bn]``."""
        work, bn, dtype = self.work, self.config.bn, self.made.out
        rows = 2 * work.half_bytes // (bn * dtype.itemsize)
        key = ("partials", bn, dtype)
        return kept(work.descriptors, key, lambda: [data.view(dtype).view(rows, bn) for data in work.data])


def all_gather_gemm(
    made: OperatorCall, work: Slab, config: KernelConfig, kernels: ModuleType
) -> tuple[torch.Tensor, torch.Tensor | Fp8Operand]:
    """``([m, n], gathered x [m, k])``; ``kernels``: those for ``config``, :mod:`ops.launch.plain` or ``hopper``.
    Without ``return_gathered`` the warp-specialised kernel, which reads the rank's own rows from x, does not copy them
    into the second result. The plain one reads them there, and copies them in any case.
    """
    x, m, k = made.x, made.m, made.k
    sms, out = sm_count(x.device), torch.empty((m, made.n), dtype=made.out, device=x.device)
    scales = made.sent_scales
    with unbroken(work, "all_gather_gemm"):
        turn = work.begin()
        gathered = work.gather_buffers(turn.half, m, k, x.dtype)[work.rank]
        # Before the kernel: see the copy engine's hazards.
        finish = push(x, work, turn.half, config.edges(k) if config.ws else WHOLE, scales)
        kernels.all_gather_gemm(SlabCall(made, out, work, turn, config, sms), gathered)
        finish()
        work.end()
    if made.fp8 is None:
        return out, gathered
    found = made.fp8.x.scale_inv if scales is None else work.scale_buffers(turn.half, m * k, scales.shape)[work.rank]
    return out, Fp8Operand(gathered.view(torch.uint8), x.dtype, found, made.fp8.x.scaling, work.tp)


def gemm_reduce_scatter(made: OperatorCall, work: Slab, config: KernelConfig, kernels: ModuleType) -> torch.Tensor:
    """``[m/tp, n]``; ``kernels`` as of :func:`all_gather_gemm`."""
    x, mp, n = made.x, made.m // work.tp, made.n
    sms = sm_count(x.device)
    if rs_tiles(mp, n, config) * work.tp > CALL_FLAGS:
        raise UserError(f"gemm_reduce_scatter: too many tiles for {mp} x {n} with plan {config.label()}")
    out = torch.empty((mp, n), dtype=made.out, device=x.device)
    with unbroken(work, "gemm_reduce_scatter"):
        call = SlabCall(made, out, work, work.begin(), config, sms)
        kernels.gemm_reduce_scatter(call)
        work.end()
    return out


class Scales:
    """What a kernel takes of the scales of FP8 operands; without any something that is not read."""

    def __init__(self, made: OperatorCall) -> None:
        """``strides``: between the rows of both operands' scales."""
        self.x = self.weight = made.x
        self.strides = (0, 0)
        self.operands: dict[str, torch.Tensor] = {}
        if made.fp8 is not None:
            self.x, self.weight = made.fp8.x.scale_inv, made.fp8.weight.scale_inv
            self.operands = {"xs": self.x, "ws": self.weight}
            if made.fp8.blocks:
                self.strides = self.x.shape[-1], self.weight.shape[-1]


def gathered_scales(call: SlabCall) -> torch.Tensor | None:
    """``[tp, kb, ld]`` of this rank, where the scales of blocks arrive."""
    scales, work = call.made.sent_scales, call.work
    if scales is None:
        return None
    buffers = work.scale_buffers(call.turn.half, call.made.m * call.made.k, scales.shape)
    return buffers[work.rank]


def kernel_key(made: OperatorCall, half: int, config: KernelConfig, sms: int) -> tuple[object, ...]:
    """Of a kernel that has been launched on a slab: everything but the operands' addresses."""
    kind: tuple[object, ...] = (made.operator, made.m, made.n, made.k, *made.kind, made.transposed)
    if made.fp8 is not None:
        kind += (made.fp8.x.scale_inv.shape, made.fp8.weight.scale_inv.shape)
    return (*kind, half, config, sms, made.bias is not None, made.return_gathered)


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
    """Whether the warp-specialised kernels can run ``call``; nothing else decides it. They are for Hopper (not what
    came later) and operands that TMA can address. Those of all_gather_gemm take whole tiles of ``bm`` rows of a shard;
    of gemm_reduce_scatter, where ``x`` is in blocks, the scales of every shard begin at a multiple of 16 bytes.
    """
    x = call.x
    k = x.shape[-1]
    if not x.is_cuda or _capability(x.device) != (9, 0) or not uses_tma(x, call.n, k):
        return False
    if call.operator == "all_gather_gemm":
        return x.numel() // k % bm == 0
    in_blocks = call.operator == "gemm_reduce_scatter" and call.fp8 is not None and call.fp8.blocks
    return not in_blocks or call.m // call.group.size() * 4 % ALIGNMENT == 0


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
