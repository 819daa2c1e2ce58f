"""Arguments of the warp-specialised Hopper kernels; as :mod:`megatron_flux.ops.arguments`. Imports Gluon."""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from megatron_flux.kernels.hopper import pieces
from megatron_flux.kernels.hopper.ag_gemm import hopper_ag_gemm_kernel
from megatron_flux.kernels.hopper.gemm_rs import hopper_gemm_rs_kernel
from megatron_flux.kernels.launch import Tiles
from megatron_flux.ops.arguments import DTYPES, Launch, Scales, SlabCall
from megatron_flux.ops.kernel_config import cdiv, divided, last_round, workers

PIECE, LINE = pieces.PIECE.value, pieces.LINE.value
SM_FLOP_PER_NS = 5300  # sustained, of one SM of an H200
UNDIVIDED = {"left": 0, "parts": 1}


def all_gather_gemm(at: SlabCall) -> Launch:
    """Fill ``out``; x has at least a tile's rows. Without ``return_gathered`` the local shard is not
    copied into ``gathered``: the kernel reads it from x.
    """
    call, work, config, rows = at.call, at.work, at.config, all_gather_gemm_rows(at)
    x, weight, bias, scales = call.x, call.weight, call.bias, Scales(call)
    k, n = call.k, call.n
    edges = config.edges(k)
    by: tuple[Any, ...] = (scales.x, scales.x, scales.weight)
    if at.scales is not None:
        by = (rows["xs"], rows["gs"], _scales_of_weight(scales.weight, config.bn))
    chunk_k = edges.columns or cdiv(k, config.bk) * config.bk
    source = x.view(torch.uint8) if call.fp8 else x
    arguments = (
        rows["a"], rows["xd"], _descriptor(weight, *at.weight_box()), rows["c"],
        source, source if at.own is None else at.own, x if bias is None else bias,
        *by,
        work.data_table, work.flags[work.rank],
        *work.arguments(at.half), at.half * (work.half_bytes // x.element_size()),
        n, k, rows["mp"], chunk_k, work.rank, rows["left"], rows["parts"], work.sums if _splits(at) else at.out,
    )  # fmt: skip
    constants = at.constants() | {
        "GROUP": config.group, "KCH": cdiv(k, chunk_k), "WIDTH": 1024, "SPAN": config.span,
        "EARLY": edges.early, "LATE": edges.late, "KEEP": call.return_gathered, "OWN": at.own is not None,
        "STAGES": config.stages, "RING": config.ring, "BIAS": bias is not None, "TEAMS": config.teams,
        "SPLIT_K": _splits(at), "num_warps": 8 // config.teams,
    }  # fmt: skip
    own = () if at.own is None else ("kept",)
    operands = ("xd", "b", "c", "x", *own, *(() if bias is None else ("bias",)), *_scale_names(call))
    return Launch(hopper_ag_gemm_kernel, at.sms, arguments, constants, operands, rows)


def all_gather_gemm_rows(at: SlabCall) -> dict[str, Any]:
    """Return the arguments of :func:`all_gather_gemm` that follow from m; ``gathered`` and ``out`` have any shape."""
    call, config, (m, n, k) = at.call, at.config, at.call.sizes
    bm, mp = config.bm, m // at.work.tp
    rows = {
        "a": _tiles(at.gathered, m, k, bm, config.bk), "xd": _tiles(call.x, mp, k, bm, config.bk),
        "c": _tiles(at.out, m, n, bm, PIECE), "mp": mp,
        # Where two tiles share rows, both must sum in one order: then these have the same bits.
        **(UNDIVIDED if mp % bm else _last_round(at, cdiv(mp, bm) * at.work.tp, at.sms)),
    }  # fmt: skip
    if at.scales is not None:
        assert call.fp8 is not None  # noqa: S101
        rows |= {"xs": _scales_of(call.fp8.x.scale_inv, bm), "gs": _scales_of(at.scales, bm)}
    return rows


def gemm_reduce_scatter(at: SlabCall) -> Launch:
    """Fill ``out``, the local rows or, of a gemm_all_reduce, all; any number of rows."""
    call, work, config, out, rows = at.call, at.work, at.config, at.out, gemm_reduce_scatter_rows(at)
    weight, scales, space, k, n = call.weight, Scales(call), at.workspaces()[work.rank], call.k, call.n
    by: tuple[Any, ...] = (scales.x, scales.weight)
    if call.fp8 is not None and call.fp8.blocks:
        by = (rows["xs"], _scales_of_weight(scales.weight, config.bn))
    arguments = (
        rows["a"], _descriptor(weight, *at.weight_box()),
        *_sinks(at), *by, out if call.addend is None else call.addend,
        work.flag_table, work.flags[work.rank], space, out,
        *work.arguments(at.half), at.half * (space.shape[0] // 2),
        n, cdiv(k, config.bk), rows["mp"], work.rank,
        2 * config.bm * config.bn * k * config.spread // (100 * SM_FLOP_PER_NS * (2 if call.fp8 else 1)),
        rows["workers"], rows["left"], rows["parts"], work.sums if _splits(at) else at.out,
    )  # fmt: skip
    constants = at.constants() | {
        "STEPS": at.steps, "BAND": config.band, "STAGES": config.stages, "RING": config.ring, "PIECES": 4,
        "TEAMS": config.teams, "DEDICATED": config.dedicated_reducers, "num_warps": 8 // config.teams,
        "ADDEND": call.addend is not None, "BESIDE": at.beside, "SPLIT_K": _splits(at),
    }  # fmt: skip
    operands = ("a", "b", "out", *_scale_names(call), *(() if call.addend is None else ("addend",)))
    return Launch(hopper_gemm_rs_kernel, at.sms, arguments, constants, operands, rows)


def gemm_reduce_scatter_rows(at: SlabCall) -> dict[str, Any]:
    """Return the arguments of :func:`gemm_reduce_scatter` that follow from m."""
    call, config, (m, n, k) = at.call, at.config, at.call.sizes
    mp = m // at.steps
    busy = workers(config, mp, n, at.steps, at.sms)
    rows: dict[str, Any] = {
        "a": _tiles(call.x, m, k, config.bm, config.bk), "mp": mp, "workers": busy,
        **_last_round(at, cdiv(mp, config.bm) * at.steps, busy),
    }  # fmt: skip
    if call.fp8 is not None and call.fp8.blocks:
        rows["xs"] = _scales_of(call.fp8.x.scale_inv, config.bm)
    return rows


def _splits(at: SlabCall) -> bool:
    return divided(at.call, at.config)


def _last_round(at: SlabCall, row_blocks: int, busy: int) -> dict[str, int]:
    if not _splits(at):
        return UNDIVIDED
    call, config = at.call, at.config
    left, parts = last_round(row_blocks * cdiv(call.n, config.bn), cdiv(call.k, config.bk), busy)
    return {"left": left, "parts": parts}


def _scale_names(call: Any) -> tuple[str, ...]:
    return () if call.fp8 is None else ("xs", "ws")


def _sinks(at: SlabCall) -> list[Any]:
    """Return each step's destination as a descriptor; None beyond the group's ranks."""
    work, config = at.work, at.config
    tp = work.tp

    def make() -> list[Any]:
        spaces = at.workspaces()
        return [_descriptor(spaces[(work.rank + 1 + step) % tp], config.bm, PIECE) for step in range(tp)]

    return at.get_or_create("sinks", make) + [None] * (8 - tp)


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> Tiles:
    return Tiles(tensor, tensor.shape, tensor.stride(), (rows, cols), _layout(rows, cols, tensor.dtype))


def _tiles(base: torch.Tensor, m: int, n: int, rows: int, cols: int) -> Tiles:
    """Describe ``base``, contiguous and of any shape, as ``[m, n]``."""
    return Tiles(base, (m, n), (n, 1), (rows, cols), _layout(rows, cols, base.dtype))


def _scales_of(scales: torch.Tensor, rows: int) -> Tiles:
    """Describe ``rows`` scales of x in a block of k; ``[..., kb, ld]``."""
    return _descriptor(scales.view(-1, scales.shape[-1]), 1, rows)


def _scales_of_weight(scales: torch.Tensor, columns: int) -> Tiles:
    """Describe a line of scales of ``columns`` in a block of k, and the blocks after it; ``[nb, ld]``."""
    rows = columns // 128
    return _descriptor(scales, rows, LINE // rows)


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, cols], DTYPES[dtype])
