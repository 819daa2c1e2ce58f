"""Launching the warp-specialised Hopper kernels. Imports Gluon.

The first launch of a kind goes through Triton; what it found out is kept with the slab, and later ones only put in the
operands' addresses (:mod:`megatron_flux.kernels.launch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megatron_flux.comm.slab import kept
from megatron_flux.kernels import launch as kernel_launch
from megatron_flux.kernels.hopper import pieces
from megatron_flux.kernels.hopper.ag_gemm import hopper_ag_gemm_kernel
from megatron_flux.kernels.hopper.gemm_rs import hopper_gemm_rs_kernel
from megatron_flux.ops.kernel_config import cdiv, workers
from megatron_flux.ops.launch import DTYPES, Scales, SlabCall, gathered_scales, kernel_key

PIECE, LINE = pieces.PIECE.value, pieces.LINE.value
SM_FLOP_PER_NS = 5300  # what one SM of an H200 multiplies in a nanosecond, in the long run


def all_gather_gemm(call: SlabCall, gathered: torch.Tensor) -> None:
    """Fill ``call.out``; the rows of x must be a multiple of the tile's. Without ``return_gathered`` the rank's own
    rows are not copied into ``gathered``: the kernel reads them from x.
    """
    made, work, turn, config = call.made, call.work, call.turn, call.config
    x, weight, bias = made.x, made.weight, made.bias
    (mp, k), n, scales = x.shape, made.n, Scales(call.made)
    arrived = gathered_scales(call)
    if arrived is not None and made.return_gathered:
        arrived[work.rank].copy_(scales.x)

    def launch() -> kernel_launch.Launch:
        edges = config.edges(k)
        by = (scales.x, scales.x, scales.weight)
        if arrived is not None:
            own, all_ranks = (_scales_of(t, config.bm) for t in (scales.x, arrived))
            by = (own, all_ranks, _scales_of_weight(scales.weight, config.bn))
        chunk_k = edges.columns or cdiv(k, config.bk) * config.bk
        arguments = (
            _descriptor(gathered, config.bm, config.bk),
            _descriptor(x, config.bm, config.bk),
            _descriptor(weight, *call.weight_box()),
            _descriptor(call.out, config.bm, PIECE),
            x.view(torch.uint8) if made.fp8 else x, x if bias is None else bias,
            *by,
            work.data_table, work.flags[work.rank],
            *work.arguments(turn), turn.half * (work.half_bytes // x.element_size()),
            n, k, mp, chunk_k, work.rank,
        )  # fmt: skip
        constants = call.constants() | {
            "GROUP": config.group, "KCH": cdiv(k, chunk_k), "WIDTH": 1024, "SPAN": config.span,
            "EARLY": edges.early, "LATE": edges.late, "KEEP": made.return_gathered, "STAGES": config.stages,
            "RING": config.ring, "BIAS": bias is not None, "TEAMS": config.teams,
        }  # fmt: skip
        warps = 8 // config.teams
        compiled = kernel_launch.by_triton(hopper_ag_gemm_kernel, call.sms, *arguments, **constants, num_warps=warps)
        return compiled, arguments

    operands = {"xd": x, "b": weight, "c": call.out, "x": x} | ({} if bias is None else {"bias": bias})
    _launch(call, launch, operands | scales.operands)


def gemm_reduce_scatter(call: SlabCall) -> None:
    """As :func:`all_gather_gemm`, of any number of rows."""
    made, work, turn, config = call.made, call.work, call.turn, call.config
    x, weight, scales = made.x, made.weight, Scales(call.made)
    (mp, n), k = call.out.shape, x.shape[1]

    def launch() -> kernel_launch.Launch:
        space = call.workspaces()[work.rank]
        by = (scales.x, scales.weight)
        if made.fp8 is not None and made.fp8.blocks:
            by = (_scales_of(scales.x, config.bm), _scales_of_weight(scales.weight, config.bn))
        arguments = (
            _descriptor(x, config.bm, config.bk),
            _descriptor(weight, *call.weight_box()),
            *_sinks(call), *by,
            work.flag_table, work.flags[work.rank], space, call.out,
            *work.arguments(turn), turn.half * (space.shape[0] // 2),
            n, cdiv(k, config.bk), mp, work.rank,
            2 * config.bm * config.bn * k * config.spread // (100 * SM_FLOP_PER_NS * (2 if made.fp8 else 1)),
        )  # fmt: skip
        own = {"BAND": config.band, "STAGES": config.stages, "RING": config.ring, "PIECES": 4, "TEAMS": config.teams}
        own["STEPS"] = work.tp
        own["WORKERS"] = workers(config, mp, n, work.tp, call.sms)
        constants, warps = call.constants() | own, 8 // config.teams
        compiled = kernel_launch.by_triton(hopper_gemm_rs_kernel, call.sms, *arguments, **constants, num_warps=warps)
        return compiled, arguments

    _launch(call, launch, {"a": x, "b": weight, "out": call.out} | scales.operands)


def _launch(call: SlabCall, first: Callable[[], kernel_launch.Launch], operands: dict[str, torch.Tensor]) -> None:
    key = kernel_key(call.made, call.turn.half, call.config, call.sms)
    kernel_launch.first_or_again(call.work.kernels, key, call.sms, first, call.made.x.device.index, **operands)


def _sinks(call: SlabCall) -> list[Any]:
    """Every step's destination as a descriptor, None beyond the group's ranks."""
    work, config = call.work, call.config
    tp = work.tp

    def make() -> list[Any]:
        spaces = call.workspaces()
        return [_descriptor(spaces[(work.rank + 1 + step) % tp], config.bm, PIECE) for step in range(tp)]

    return kept(work.descriptors, ("partials by step", config.bm, config.bn, call.made.out), make) + [None] * (8 - tp)


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    layout = _layout(rows, cols, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols], layout)


def _scales_of(scales: torch.Tensor, rows: int) -> TensorDescriptor:
    """``rows`` scales of x in a block of k; ``[..., kb, ld]``."""
    return _descriptor(scales.view(-1, scales.shape[-1]), 1, rows)


def _scales_of_weight(scales: torch.Tensor, columns: int) -> TensorDescriptor:
    """A line of scales of ``columns`` in a block of k, and the blocks after it; ``[nb, ld]``."""
    rows = columns // 128
    return _descriptor(scales, rows, LINE // rows)


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], DTYPES[dtype])
