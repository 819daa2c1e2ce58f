"""Launching the warp-specialised Hopper kernels. Imports Gluon; only :mod:`megatron_flux.ops.launch.plain` uses it.

The first launch of a kind goes through Triton; what it found out is kept with the slab, and later ones only put in the
operands' addresses (:mod:`megatron_flux.kernels.launch`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_flux.comm.copy_engine import view
from megatron_flux.comm.graph_capture import turn_arguments
from megatron_flux.kernels import launch as kernel_launch
from megatron_flux.kernels.hopper.ag_gemm import hopper_ag_gemm_kernel
from megatron_flux.kernels.hopper.gemm_rs import hopper_gemm_rs_kernel
from megatron_flux.ops.kernel_config import cdiv
from megatron_flux.ops.launch.operands import DTYPES, Call

PIECE = 64
SM_FLOP_PER_NS = 5300
"""What one SM of an H200 multiplies in a nanosecond, in the long run."""


def all_gather_gemm(call: Call, gathered: torch.Tensor) -> None:
    """Fill ``call.out``; the rows of x must be a multiple of the tile's.

    The caller allocates, takes the turn and enqueues the copies. Without ``return_gathered`` the rank's own rows are
    not copied into ``gathered``: the kernel reads them from x.
    """
    x, work, turn, config, bias = call.x, call.work, call.turn, call.config, call.bias
    (mp, k), n = x.shape, call.out.shape[1]
    variant = (x.dtype, call.transposed, config, call.sms, bias is not None, call.return_gathered)
    key = ag_key(turn.half, mp, n, k, *variant)

    def launch() -> kernel_launch.Launch:
        pushes, edges = config.comm > 0, config.edges(k)
        chunk_k = config.chunk_k(k) if pushes else edges.columns or cdiv(k, config.bk) * config.bk
        arguments = (
            _descriptor(gathered, config.bm, config.bk),
            _descriptor(x, config.bm, config.bk),
            _descriptor(call.weight, *call.weight_box()),
            _descriptor(call.out, config.bm, PIECE),
            x,
            x if bias is None else bias,
            work.data_table,
            work.flag_table,
            work.flags[work.rank],
            *turn_arguments(work, turn),
            turn.half * (work.half_bytes // x.element_size()),
            n,
            k,
            mp,
            chunk_k,
            work.rank,
        )
        constants = {
            **call.constants(),
            "GROUP": config.group,
            "KCH": cdiv(k, chunk_k),
            "WIDTH": 1024,
            "PUSH": pushes,
            "SPAN": config.span,
            "EARLY": edges.early,
            "LATE": edges.late,
            "KEEP": call.return_gathered,
            "STAGES": config.stages,
            "RING": config.ring,
            "BIAS": bias is not None,
        }
        return kernel_launch.by_triton(hopper_ag_gemm_kernel, call.sms, *arguments, **constants, num_warps=8), arguments

    operands = {"xd": x, "b": call.weight, "c": call.out, "x": x} | ({} if bias is None else {"bias": bias})
    kernel_launch.first_or_again(work.kernels, key, call.sms, launch, x.device.index, **operands)


def gemm_reduce_scatter(call: Call) -> None:
    """As :func:`all_gather_gemm`, of any number of rows."""
    x, work, turn, config = call.x, call.work, call.turn, call.config
    (mp, n), k = call.out.shape, x.shape[1]
    key = rs_key(turn.half, mp, n, k, x.dtype, call.transposed, config, call.sms)

    def launch() -> kernel_launch.Launch:
        space = call.workspaces()[work.rank]
        arguments = (
            _descriptor(x, config.bm, config.bk),
            _descriptor(call.weight, *call.weight_box()),
            *_sinks(call),
            work.flag_table,
            work.flags[work.rank],
            space,
            call.out,
            *turn_arguments(work, turn),
            turn.half * (space.shape[0] // 2),
            n,
            cdiv(k, config.bk),
            mp,
            work.rank,
            2 * config.bm * config.bn * k * config.spread // (100 * SM_FLOP_PER_NS),
        )
        constants = {
            **call.constants(),
            "BAND": config.band,
            "STAGES": config.stages,
            "RING": config.ring,
            "PIECES": 4,
        }
        return kernel_launch.by_triton(hopper_gemm_rs_kernel, call.sms, *arguments, **constants, num_warps=8), arguments

    operands = {"a": x, "b": call.weight, "out": call.out}
    kernel_launch.first_or_again(work.kernels, key, call.sms, launch, x.device.index, **operands)


def ag_key(half: int, mp: int, n: int, k: int, *others: object) -> tuple[object, ...]:
    """Of a kernel that has been launched on a slab; others: dtype, transposed, config, SMs, whether it adds a bias,
    whether it copies the own rows.
    """
    return ("ag", half, mp, n, k, *others)


def rs_key(half: int, mp: int, n: int, k: int, *others: object) -> tuple[object, ...]:
    """As :func:`ag_key`, without the last two."""
    return ("rs", half, mp, n, k, *others)


def _sinks(call: Call) -> list[Any]:
    """Every step's destination as a descriptor, None beyond the group's ranks."""
    work, config = call.work, call.config
    tp = work.tp

    def make() -> list[Any]:
        spaces = call.workspaces()
        return [_descriptor(spaces[(work.rank + 1 + step) % tp], config.bm, PIECE) for step in range(tp)]

    return view(work.descriptors, ("partials by step", config.bm, config.bn, call.x.dtype), make) + [None] * (8 - tp)


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    layout = _layout(rows, cols, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols], layout)


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], DTYPES[dtype])
