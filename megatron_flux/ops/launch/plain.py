"""Launching the plain kernels. Imports triton."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_flux.comm.slab import kept
from megatron_flux.kernels.launch import by_triton
from megatron_flux.kernels.plain import ag_gemm_kernel, gemm_rs_kernel
from megatron_flux.ops.launch import Scales, SlabCall, gathered_scales, uses_tma


def all_gather_gemm(call: SlabCall, gathered: torch.Tensor) -> None:
    """Fill ``call.out``, and the own rows of ``gathered``."""
    x, weight, out, work, config, half = call.made.x, call.made.weight, call.out, call.work, call.config, call.turn.half
    (mp, k), (m, n), rank = x.shape, out.shape, work.rank
    _copy_by_sms(gathered[rank * mp : (rank + 1) * mp], x)
    scales, arrived = Scales(call.made), gathered_scales(call)
    if arrived is not None:
        _copy_by_sms(arrived[rank], scales.x)
    tma, mask_rows = uses_tma(x, n, k), mp % config.bm != 0
    a, b, c = gathered, weight, out
    if tma:
        key = ("a", half, m, k, x.dtype, config.bm, config.bk)
        a = kept(work.descriptors, key, lambda: _descriptor(gathered, config.bm, config.bk))
        b = _descriptor(weight, *call.weight_box())
        if not mask_rows:
            c = _descriptor(out, config.bm, config.bn // 2 if config.split else config.bn)
    bias = call.made.bias
    arguments = (
        a, b, c, x if bias is None else bias, scales.x if arrived is None else arrived, scales.weight, work.flags[rank],
        *work.arguments(call.turn), m, n, k, mp, *scales.strides, rank,
    )  # fmt: skip
    _launch(ag_gemm_kernel, call, arguments, GROUP=config.group, TMA=tma, MASK_ROWS=mask_rows, BIAS=bias is not None)


def gemm_reduce_scatter(call: SlabCall) -> None:
    """Fill ``call.out``."""
    x, weight, out, work, config = call.made.x, call.made.weight, call.out, call.work, call.config
    (m, k), (mp, n), rank, tp = x.shape, out.shape, work.rank, work.tp
    tma, width = uses_tma(x, n, k), config.bn // 2 if config.split else config.bn
    spaces, scales = call.workspaces(), Scales(call.made)
    a, b, sinks = x, weight, [out] * 8
    if tma:
        a, b = _descriptor(x, config.bm, config.bk), _descriptor(weight, *call.weight_box())
        key = ("partials by TMA", config.bm, config.bn, width, out.dtype)
        by_rank = kept(work.descriptors, key, lambda: [_descriptor(space, config.bm, width) for space in spaces])
        sinks = [by_rank[(rank + 1 + step % tp) % tp] for step in range(8)]
    arguments = (
        a, b, *sinks, scales.x, scales.weight, work.data_table, work.flag_table, work.flags[rank], spaces[rank], out,
        *work.arguments(call.turn), call.turn.half * (spaces[rank].shape[0] // 2),
        m, n, k, mp, *scales.strides, rank, call.sms - min(config.reducers, call.sms - 1),
    )  # fmt: skip
    chunk = min(8192, config.bm * config.bn // 4)
    constants = {"STEPS": work.tp, "BAND": config.band, "CHUNK": chunk, "PIECES": 2, "TMA": tma, "JOIN": x.is_cuda}
    _launch(gemm_rs_kernel, call, arguments, **constants)


def _launch(kernel: Any, call: SlabCall, arguments: tuple[Any, ...], **constants: Any) -> None:
    config, cuda = call.config, call.made.x.is_cuda
    by_triton(
        kernel, call.sms, *arguments, **call.constants(), **constants, SPLIT=config.split, CPU=not cuda,
        THREADS=32 * config.warps, num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip


def _copy_by_sms(target: torch.Tensor, source: torch.Tensor) -> None:
    """A kernel and not a memcpy: the copy engines are busy with the peers' shards."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.element_size()]
    torch.bitwise_or(source.view(bits), 0, out=target.view(bits))


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])
