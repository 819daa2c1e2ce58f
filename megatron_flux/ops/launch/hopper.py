"""Launching the warp-specialised Hopper kernels. Imports Gluon; only :mod:`megatron_flux.ops.launch.plain` uses it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_flux.comm.slab import ENTER_WORDS, FLAG_WORDS, Slab, Turn
from megatron_flux.kernels import launch as relaunch
from megatron_flux.kernels.hopper.ag_gemm import hopper_ag_gemm_kernel
from megatron_flux.kernels.hopper.gemm_rs import hopper_gemm_rs_kernel
from megatron_flux.ops.kernel_config import KernelConfig, cdiv

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
PIECE = 64
SM_FLOP_PER_NS = 5300
"""What one SM of an H200 multiplies in a nanosecond, in the long run."""


def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    c: torch.Tensor,
    work: Slab,
    turn: Turn,
    gathered: torch.Tensor,
    plan: KernelConfig,
    sms: int,
    transposed: bool,
    bias: torch.Tensor | None,
    return_gathered: bool,
) -> None:
    """Fill ``c`` ``[m, n]`` for x ``[mp, k]``; ``mp`` must be a multiple of the tile's rows.

    The caller allocates, takes the turn and enqueues the copies. Without ``return_gathered`` the rank's own rows
    are not copied into ``gathered``: the kernel reads them from x.
    """
    mp, k = x.shape
    tp, rank, n = work.tp, work.rank, c.shape[1]
    key = ag_key(turn.half, mp, n, k, x.dtype, transposed, plan, sms, bias is not None, return_gathered)

    def launch() -> relaunch.Launch:
        push = plan.comm > 0
        edges = plan.edges(k)
        chunk_k = plan.chunk_k(k) if push else edges.columns or cdiv(k, plan.bk) * plan.bk
        arguments = (
            _desc(gathered, plan.bm, plan.bk),
            _desc(x, plan.bm, plan.bk),
            _weight(weight, plan, transposed),
            _desc(c, plan.bm, PIECE),
            x,
            x if bias is None else bias,
            work.data_table,
            work.flag_table,
            work.flags[rank],
            work.ctrl,
            work.epochs,
            work.alarm.words,
            work.alarm.limit,
            turn.half,
            turn.next_half,
            turn.half * FLAG_WORDS + ENTER_WORDS,
            turn.half * (work.half_bytes // x.element_size()),
            n,
            k,
            mp,
            chunk_k,
            rank,
        )
        constants = {
            "TP": tp,
            "BM": plan.bm,
            "BN": plan.bn,
            "BK": plan.bk,
            "GROUP": plan.group,
            "KCH": cdiv(k, chunk_k),
            "WIDTH": 1024,
            "PUSH": push,
            "SPAN": plan.span,
            "EARLY": edges.early,
            "LATE": edges.late,
            "KEEP": return_gathered,
            "CTAS": sms,
            "STAGES": plan.stages,
            "RING": plan.ring,
            "TRANSPOSED": transposed,
            "BIAS": bias is not None,
            "DTYPE": TYPES[x.dtype],
        }
        return relaunch.by_triton(hopper_ag_gemm_kernel, sms, *arguments, **constants, num_warps=8), arguments

    operands = {"xd": x, "b": weight, "c": c, "x": x} | ({} if bias is None else {"bias": bias})
    relaunch.first_or_again(work.kernels, key, sms, launch, x.device.index, **operands)


def ag_key(half: int, mp: int, n: int, k: int, *others: object) -> tuple[object, ...]:
    """Of a kernel's relaunch in ``work.kernels``; others: dtype, transposed, plan, SMs, whether it adds a bias,
    whether it copies the own rows.
    """
    return ("ag", half, mp, n, k, *others)


def rs_key(half: int, mp: int, n: int, k: int, *others: object) -> tuple[object, ...]:
    """As :func:`ag_key`, without the last two."""
    return ("rs", half, mp, n, k, *others)


def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    work: Slab,
    turn: Turn,
    plan: KernelConfig,
    sms: int,
    transposed: bool,
) -> None:
    """Fill ``out`` ``[mp, n]`` for x ``[m, k]``; as :func:`all_gather_gemm`."""
    k = x.shape[1]
    tp, rank = work.tp, work.rank
    mp, n = out.shape
    key = rs_key(turn.half, mp, n, k, x.dtype, transposed, plan, sms)

    def launch() -> relaunch.Launch:
        space, sinks = _sinks(work, plan, x.dtype)
        arguments = (
            _desc(x, plan.bm, plan.bk),
            _weight(weight, plan, transposed),
            *sinks,
            work.flag_table,
            work.flags[rank],
            space,
            out,
            work.ctrl,
            work.epochs,
            work.alarm.words,
            work.alarm.limit,
            turn.half,
            turn.next_half,
            turn.half * FLAG_WORDS + ENTER_WORDS,
            turn.half * (space.shape[0] // 2),
            n,
            cdiv(k, plan.bk),
            mp,
            rank,
            2 * plan.bm * plan.bn * k * plan.spread // (100 * SM_FLOP_PER_NS),
        )
        constants = {
            "TP": tp,
            "BM": plan.bm,
            "BN": plan.bn,
            "BK": plan.bk,
            "BAND": plan.band,
            "CTAS": sms,
            "STAGES": plan.stages,
            "RING": plan.ring,
            "PIECES": 4,
            "TRANSPOSED": transposed,
            "DTYPE": TYPES[x.dtype],
        }
        return relaunch.by_triton(hopper_gemm_rs_kernel, sms, *arguments, **constants, num_warps=8), arguments

    relaunch.first_or_again(work.kernels, key, sms, launch, x.device.index, a=x, b=weight, out=out)


def _sinks(work: Slab, plan: KernelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any]]:
    """The rank's workspace ``[rows, bn]``, and every step's destination as a descriptor (None beyond ``tp``)."""
    key = ("hopper sinks", plan.bm, plan.bn, dtype)
    found = work.descriptors.get(key)
    if found is None:
        tp = work.tp
        rows = 2 * work.half_bytes // (plan.bn * dtype.itemsize)
        spaces = [data.view(dtype).view(rows, plan.bn) for data in work.data]
        sinks = [_desc(spaces[(work.rank + 1 + step) % tp], plan.bm, PIECE) for step in range(tp)]
        found = work.descriptors[key] = (spaces[work.rank], sinks + [None] * (8 - tp))
    return found


def _weight(weight: torch.Tensor, plan: KernelConfig, transposed: bool) -> TensorDescriptor:
    return _desc(weight, plan.bk, plan.bn) if transposed else _desc(weight, plan.bn, plan.bk)


def _desc(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [rows, cols], _layout(rows, cols, tensor.dtype)
    )


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], TYPES[dtype])
