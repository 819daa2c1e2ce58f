"""Fused calls from the slab's turn to its end, and the launches of the plain kernels. Imports triton."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_flux.comm.copy_engine import WHOLE, buffers_of, push, view
from megatron_flux.comm.graph_capture import begin, turn_arguments
from megatron_flux.comm.slab import CALL_FLAGS, Slab, unbroken
from megatron_flux.errors import UserError
from megatron_flux.kernels.launch import by_triton
from megatron_flux.kernels.plain.ag_gemm import ag_gemm_kernel
from megatron_flux.kernels.plain.gemm_rs import gemm_rs_kernel
from megatron_flux.ops.kernel_config import KernelConfig, rs_tiles
from megatron_flux.ops.launch.operands import Call, sm_count, uses_tma


def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    work: Slab,
    plan: KernelConfig,
    *,
    transposed: bool,
    bias: torch.Tensor | None = None,
    return_gathered: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``([m, n], gathered x [m, k])`` for x ``[mp, k]``; ``bias`` ``[n]`` is added before rounding.

    Without ``return_gathered`` the warp-specialised kernel, which reads the rank's own rows from x, does not copy them
    into the second result. The plain one reads them there, and copies them in any case.
    """
    (mp, k), tp = x.shape, work.tp
    n = weight.shape[1] if transposed else weight.shape[0]
    sms = sm_count(x.device)
    out = torch.empty((mp * tp, n), dtype=x.dtype, device=x.device)
    with unbroken(work, "all_gather_gemm"):
        turn = begin(work)
        gathered = buffers_of(work, turn.half, mp * tp, k, x.dtype)[work.rank]
        call = Call(x, weight, out, work, turn, plan, sms, transposed, bias, return_gathered)
        finish = None
        if not (plan.ws and plan.comm):  # before the kernel: see the copy engine's hazards
            finish = push(x, work, turn.half, plan.edges(k) if plan.ws else WHOLE)
        if plan.ws:
            from megatron_flux.ops.launch import hopper as launch_hopper

            launch_hopper.all_gather_gemm(call, gathered)
        else:
            _all_gather_gemm(call, gathered)
        if finish is not None:
            finish()
        work.end()
    return out, gathered


def gemm_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, work: Slab, plan: KernelConfig, *, transposed: bool
) -> torch.Tensor:
    """``[mp, n]`` for x ``[m, k]``."""
    tp, m = work.tp, x.shape[0]
    mp, n = m // tp, weight.shape[1] if transposed else weight.shape[0]
    sms = sm_count(x.device)
    if rs_tiles(mp, n, plan) * tp > CALL_FLAGS:
        raise UserError(f"gemm_reduce_scatter: too many tiles for {mp} x {n} with plan {plan.label()}")
    out = torch.empty((mp, n), dtype=x.dtype, device=x.device)
    with unbroken(work, "gemm_reduce_scatter"):
        call = Call(x, weight, out, work, begin(work), plan, sms, transposed)
        if plan.ws:
            from megatron_flux.ops.launch import hopper as launch_hopper

            launch_hopper.gemm_reduce_scatter(call)
        else:
            _gemm_reduce_scatter(call)
        work.end()
    return out


def _all_gather_gemm(call: Call, gathered: torch.Tensor) -> None:
    x, weight, out, work, config, half = call.x, call.weight, call.out, call.work, call.config, call.turn.half
    (mp, k), (m, n), rank = x.shape, out.shape, work.rank
    _copy_by_sms(gathered[rank * mp : (rank + 1) * mp], x)
    tma, mask_rows = uses_tma(x, n, k), mp % config.bm != 0
    a, b, c = gathered, weight, out
    if tma:
        key = ("a", half, m, k, x.dtype, config.bm, config.bk)
        a = view(work.descriptors, key, lambda: _descriptor(gathered, config.bm, config.bk))
        b = _descriptor(weight, *call.weight_box())
        if not mask_rows:
            c = _descriptor(out, config.bm, config.bn // 2 if config.split else config.bn)
    by_triton(
        ag_gemm_kernel,
        call.sms,
        a,
        b,
        c,
        x if call.bias is None else call.bias,
        work.flags[rank],
        *turn_arguments(work, call.turn),
        m,
        n,
        k,
        mp,
        rank,
        **call.constants(),
        GROUP=config.group,
        TMA=tma,
        MASK_ROWS=mask_rows,
        SPLIT=config.split,
        BIAS=call.bias is not None,
        CPU=not x.is_cuda,
        THREADS=32 * config.warps,
        num_stages=config.stages,
        num_warps=config.warps,
    )


def _gemm_reduce_scatter(call: Call) -> None:
    x, weight, out, work, config = call.x, call.weight, call.out, call.work, call.config
    (m, k), (mp, n), rank, tp = x.shape, out.shape, work.rank, work.tp
    tma, width = uses_tma(x, n, k), config.bn // 2 if config.split else config.bn
    spaces = call.workspaces()
    a, b, sinks = x, weight, [out] * 8
    if tma:
        a, b = _descriptor(x, config.bm, config.bk), _descriptor(weight, *call.weight_box())
        key = ("partials by TMA", config.bm, config.bn, width, x.dtype)
        by_rank = view(work.descriptors, key, lambda: [_descriptor(space, config.bm, width) for space in spaces])
        sinks = [by_rank[(rank + 1 + step % tp) % tp] for step in range(8)]
    by_triton(
        gemm_rs_kernel,
        call.sms,
        a,
        b,
        *sinks,
        work.data_table,
        work.flag_table,
        work.flags[rank],
        spaces[rank],
        out,
        *turn_arguments(work, call.turn),
        call.turn.half * (spaces[rank].shape[0] // 2),
        m,
        n,
        k,
        mp,
        rank,
        call.sms - min(config.reducers, call.sms - 1),
        **call.constants(),
        BAND=config.band,
        CHUNK=min(8192, config.bm * config.bn // 4),
        PIECES=2,
        TMA=tma,
        SPLIT=config.split,
        JOIN=x.is_cuda,
        CPU=not x.is_cuda,
        THREADS=32 * config.warps,
        num_stages=config.stages,
        num_warps=config.warps,
    )


def _copy_by_sms(target: torch.Tensor, source: torch.Tensor) -> None:
    """A kernel and not a memcpy: the copy engines are busy with the peers' shards."""
    bits = {2: torch.int16, 4: torch.int32}[source.element_size()]
    torch.bitwise_or(source.view(bits), 0, out=target.view(bits))


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])
