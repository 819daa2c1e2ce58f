"""Arguments of the plain kernels and those of gemm_all_reduce. Imports triton.

Each function returns the :class:`Launch` of one call; :mod:`megatron_flux.ops.fused` launches it. Those of the
warp-specialised kernels are in :mod:`megatron_flux.ops.hopper_arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_flux.comm.slab import Slab
from megatron_flux.kernels import all_reduce as all_reduce_kernels
from megatron_flux.kernels.plain import ag_gemm_kernel, gemm_rs_kernel
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig, cdiv

DTYPES = {  # Triton's and Gluon's
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
}  # fmt: skip
INTEGERS = {2: torch.int16, 4: torch.int32}
descriptor = TensorDescriptor.from_tensor

_Value = TypeVar("_Value")


class Launch(NamedTuple):
    """A kernel with all that it takes."""

    kernel: Any
    grid: int
    arguments: Sequence[Any]  # in the order of the signature
    constants: dict[str, Any]
    operands: Sequence[str] | None
    """Arguments whose addresses differ between calls of a plan, in the order in which the plan gives them; None: Triton
    launches every call."""
    rows: Mapping[str, Any] = MappingProxyType({})
    """Arguments that follow from the number of rows, by name."""
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Targets and sources that are copied before the kernel."""


@dataclass(slots=True)
class SlabCall:
    """One call of an operator on a slab."""

    call: OperatorCall  # x is a matrix; operands are aligned
    out: torch.Tensor  # the result, a matrix
    work: Slab
    half: int
    config: Any  # KernelConfig or AllReduceConfig
    sms: int
    fixed: dict[str, Any]
    """Views and descriptors of the slab that all calls of the plan share."""
    gathered: Any = None  # of this rank, where x arrives, with any leading dimensions
    scales: torch.Tensor | None = None  # [tp, kb, ld] of this rank, where scales of blocks arrive
    beside: bool = False  # kernels of other process groups may hold SMs
    own: torch.Tensor | None = None  # [m, k] of the caller's own, where a warp-specialised kernel copies what arrives

    def constants(self) -> dict[str, Any]:
        """Return the constants that all kernels of :class:`KernelConfig` have."""
        call, config, dtype = self.call, self.config, DTYPES[self.out.dtype]
        tile = {"BM": config.bm, "BN": config.bn, "BK": config.bk}
        fp8 = call.fp8
        scales = None if fp8 is None else "blocks" if fp8.blocks else "tensor"
        return {
            "TP": self.work.tp, **tile, "CTAS": self.sms, "TRANSPOSED": call.transposed, "DTYPE": dtype,
            "SCALES": scales, "PROMOTE": fp8 is not None and fp8.promoted,
        }  # fmt: skip

    @property
    def steps(self) -> int:
        """Destinations of a gemm_reduce_scatter's tiles; 1: every tile is for all ranks."""
        return 1 if self.call.operator == "gemm_all_reduce" else self.work.tp

    def weight_box(self) -> list[int]:
        """Return the rows and columns of the weight that a tile multiplies at a time."""
        bn, bk = self.config.bn, self.config.bk
        return [bk, bn] if self.call.transposed else [bn, bk]

    def workspaces(self) -> list[torch.Tensor]:
        """Return the partial sums of a gemm_reduce_scatter on every rank: both halves, ``[rows, bn]``."""
        work, bn, dtype = self.work, self.config.bn, self.call.out
        rows = 2 * work.half_bytes // (bn * dtype.itemsize)
        return self.get_or_create("workspaces", lambda: [data.view(dtype).view(rows, bn) for data in work.data])

    def get_or_create(self, name: str, factory: Callable[[], _Value]) -> _Value:
        """Return ``fixed[name]``, made by ``factory`` the first time."""
        if name not in self.fixed:
            self.fixed[name] = factory()
        return self.fixed[name]


class Scales:
    """Kernel arguments for the scales of FP8 operands; without scales, arguments that are not read."""

    def __init__(self, call: OperatorCall) -> None:
        """``strides``: between the rows of both operands' scales."""
        self.x = self.weight = call.x
        self.strides = (0, 0)
        if call.fp8 is not None:
            self.x, self.weight = call.fp8.x.scale_inv, call.fp8.weight.scale_inv
            if call.fp8.blocks:
                self.strides = self.x.shape[-1], self.weight.shape[-1]


def all_gather_gemm(at: SlabCall) -> Launch:
    """Fill ``out``. The local shard is copied into ``gathered``, where the kernel reads it."""
    call, work, config, out = at.call, at.work, at.config, at.out
    x, weight, bias, scales, rank = call.x, call.weight, call.bias, Scales(call), work.rank
    (mp, k), (m, n) = x.shape, out.shape
    gathered = at.gathered.view(m, k)
    copies = [(gathered[rank * mp : (rank + 1) * mp], x)]
    if at.scales is not None:
        copies.append((at.scales[rank], scales.x))
    tma, mask_rows = call.uses_tma, mp % config.bm != 0
    a, b, c = gathered, weight, out
    if tma:
        a = descriptor(gathered, [config.bm, config.bk])
        b = descriptor(weight, at.weight_box())
        if not mask_rows:
            c = descriptor(out, [config.bm, config.bn // 2 if config.split else config.bn])
    arguments = (
        a, b, c, x if bias is None else bias, scales.x if at.scales is None else at.scales, scales.weight,
        work.flags[rank], *work.arguments(at.half), m, n, k, mp, *scales.strides, rank,
    )  # fmt: skip
    constants = {"GROUP": config.group, "TMA": tma, "MASK_ROWS": mask_rows, "BIAS": bias is not None}
    return _plain(ag_gemm_kernel, at, arguments, constants)._replace(copies=copies)


def gemm_reduce_scatter(at: SlabCall) -> Launch:
    """Fill ``out``, the local rows or, of a gemm_all_reduce, all."""
    call, work, config, out = at.call, at.work, at.config, at.out
    x, weight, scales, spaces, rank, tp = call.x, call.weight, Scales(call), at.workspaces(), work.rank, work.tp
    (m, k), (mp, n) = x.shape, out.shape
    tma, width = call.uses_tma, config.bn // 2 if config.split else config.bn
    a, b, sinks, addend = x, weight, [out] * 8, out if call.addend is None else call.addend
    if tma:
        a, b = descriptor(x, [config.bm, config.bk]), descriptor(weight, at.weight_box())
        by_rank = at.get_or_create("sinks", lambda: [descriptor(space, [config.bm, width]) for space in spaces])
        sinks = [by_rank[(rank + 1 + step % tp) % tp] for step in range(8)]
    arguments = (
        a, b, *sinks, scales.x, scales.weight, addend,
        work.data_table, work.flag_table, work.flags[rank], spaces[rank], out,
        *work.arguments(at.half), at.half * (spaces[rank].shape[0] // 2),
        m, n, k, mp, *scales.strides, rank, at.sms - min(config.reducers, at.sms - 1),
    )  # fmt: skip
    chunk = min(8192, config.bm * config.bn // 4)
    constants = {
        "STEPS": at.steps, "BAND": config.band, "CHUNK": chunk, "PIECES": 2, "TMA": tma,
        "ADDEND": call.addend is not None,
    }  # fmt: skip
    return _plain(gemm_rs_kernel, at, arguments, constants)


def _plain(kernel: Any, at: SlabCall, arguments: Sequence[Any], constants: dict[str, Any]) -> Launch:
    config: KernelConfig = at.config
    constants = at.constants() | constants | {
        "SPLIT": config.split, "CPU": not at.call.x.is_cuda, "THREADS": 32 * config.warps,
        "num_stages": config.stages, "num_warps": config.warps,
    }  # fmt: skip
    return Launch(kernel, at.sms, arguments, constants, None)


def gemm_one_shot(at: SlabCall) -> Launch:
    """Build the arguments of a gemm_all_reduce whose kernel has the GEMM."""
    call, out, config = at.call, at.out, at.config
    x, weight, (m, n), k = call.x, call.weight, out.shape, call.k
    ctas, tma = min(at.sms, config.own_tiles(m, n)), call.uses_tma
    a, b = x, weight
    if tma:
        a = descriptor(x, [config.bm, config.bk])
        b = descriptor(weight, at.weight_box())
    arguments = (a, b, out, *_slots(at), config.stride(m, n, at.work.tp), m, n, k, at.work.rank)
    constants = {
        "BM": config.bm, "BN": config.bn, "BK": config.bk, "ROWS": config.rows_at_a_time,
        "TRANSPOSED": call.transposed, "TMA": tma, "num_stages": config.stages,
    }  # fmt: skip
    return _all_reduce(all_reduce_kernels.gemm_one_shot_kernel, ctas, at, arguments, constants, ("a", "b", "y"))


def shots(at: SlabCall, product: torch.Tensor) -> Launch:
    """Build the arguments for the sum of ``product`` over the ranks, in one or two shots."""
    config: AllReduceConfig = at.config
    kernel = all_reduce_kernels.one_shot_kernel if config.shots == 1 else all_reduce_kernels.two_shot_kernel
    count = product.numel()
    stride = config.stride(count, 0, at.work.tp)
    ctas = min(config.ctas, cdiv(count if config.shots == 1 else stride, config.block))
    integers = product.view(INTEGERS[product.element_size()])
    arguments = (integers, at.out, *_slots(at), stride, count, at.work.rank)
    return _all_reduce(kernel, ctas, at, arguments, {"BLOCK": config.block}, ("x", "y"))


def _slots(at: SlabCall) -> tuple[Any, ...]:
    """Return the slabs of all ranks by step, the arguments that every kernel takes, and the numbers in a half."""
    work, size = at.work, at.out.element_size()
    integers = INTEGERS[size]
    sinks = at.get_or_create(
        "sinks", lambda: [work.data[(work.rank + 1 + step % work.tp) % work.tp].view(integers) for step in range(8)]
    )
    alarm = work.alarm
    return (*sinks, work.epochs, alarm.words, alarm.limit, at.half, 1 - at.half, work.half_bytes // size)


def _all_reduce(
    kernel: Any, ctas: int, at: SlabCall, arguments: Sequence[Any], constants: dict[str, Any], operands: Sequence[str]
) -> Launch:
    constants = constants | {
        "TP": at.work.tp, "NOT_READY": all_reduce_kernels.NOT_READY[at.out.element_size()],
        "CPU": not at.call.x.is_cuda, "DTYPE": DTYPES[at.out.dtype], "num_warps": at.config.warps,
    }  # fmt: skip
    return Launch(kernel, ctas, arguments, constants, operands)
