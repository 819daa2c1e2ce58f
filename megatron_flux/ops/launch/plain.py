"""Launching the fused kernels: descriptors, copies, flags. Imports triton; only :mod:`ops.backends.fused` uses
it.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_flux.comm.copy_engine import buffers_of, copy_engine_push, view
from megatron_flux.comm.graph_capture import begin
from megatron_flux.comm.slab import CALL_FLAGS, ENTER_WORDS, FLAG_WORDS, Slab, unbroken
from megatron_flux.errors import UserError
from megatron_flux.kernels.launch import by_triton
from megatron_flux.kernels.plain.ag_gemm import ag_gemm_kernel
from megatron_flux.kernels.plain.gemm_rs import gemm_rs_kernel
from megatron_flux.ops.checks import ALIGNMENT
from megatron_flux.ops.kernel_config import KernelConfig, cdiv
from megatron_flux.settings import sm_margin

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
TWIN_CTAS = 3


@functools.cache
def sm_count(device: torch.device) -> int:
    """CTAs a persistent kernel may have; a handful on the CPU twin.

    Raises:
        UserError: MEGATRON_FLUX_SM_MARGIN leaves too few.
    """
    if device.type != "cuda":
        return TWIN_CTAS
    count, margin = torch.cuda.get_device_properties(device).multi_processor_count, sm_margin()
    if count - margin < TWIN_CTAS:
        raise UserError(f"MEGATRON_FLUX_SM_MARGIN={margin} leaves too few of this GPU's {count} SMs; set less")
    return count - margin


def rs_tiles(mp: int, n: int, plan: KernelConfig) -> int:
    """Tiles of a rank's own rows."""
    return cdiv(mp, plan.bm) * cdiv(n, plan.bn)


def within_flags(plan: KernelConfig, m: int) -> KernelConfig:
    """The plan with no more chunks than there are flags for: where every SM pushes, each row of a chunk has its own.

    Args:
        plan: of an all_gather_gemm.
        m: gathered rows.

    Raises:
        UserError: there are more rows than flags.
    """
    if not plan.ws or plan.comm == 0 or m * plan.chunks <= CALL_FLAGS:
        return plan
    if m > CALL_FLAGS:
        raise UserError(
            f"all_gather_gemm: {m} gathered rows cannot be pushed by SMs, at most {CALL_FLAGS}; shorten the sequence"
        )
    return replace(plan, chunks=CALL_FLAGS // m)


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
    mp, k = x.shape
    tp, rank = work.tp, work.rank
    m, n = mp * tp, weight.shape[1] if transposed else weight.shape[0]
    cuda = x.is_cuda
    sms = sm_count(x.device)
    if plan.ws:
        return _hopper_all_gather_gemm(x, weight, work, plan, sms, transposed, bias, return_gathered)
    plan = replace(plan, comm=min(plan.comm, sms - 1))
    block = plan.block or mp
    blocks = cdiv(mp, block)
    lanes = triton.next_power_of_2(max(1, plan.comm))
    chunk_k = plan.chunk_k(k)
    chunks = cdiv(k, chunk_k)
    if tp * blocks * chunks * lanes > CALL_FLAGS:
        raise UserError(f"all_gather_gemm: too many blocks for x {tuple(x.shape)} with plan {plan.label()}")
    if plan.comm == 0 and chunks > 1:
        raise UserError("all_gather_gemm: the copy engine moves whole rows; chunks need comm > 0")
    if block < mp and block % plan.bm:
        raise UserError(f"all_gather_gemm: blocks of {block} rows must be multiples of the tile's {plan.bm}")
    c = torch.empty((m, n), dtype=x.dtype, device=x.device)
    with unbroken(work, "all_gather_gemm"):
        turn = begin(work)
        buffers = buffers_of(work, turn.half, m, k, x.dtype)
        gathered = buffers[rank]
        flag_off = turn.half * FLAG_WORDS + ENTER_WORDS
        finish = None
        if plan.comm == 0:
            finish = copy_engine_push(x, work, turn, buffers, flag_off, block, plan.pace)
        _copy_by_sms(gathered[rank * mp : (rank + 1) * mp], x)
        early = sms - plan.comm
        per = cdiv(block, plan.bm) * cdiv(n, plan.bn)
        skip = plan.skip if plan.skip * early <= per * blocks * tp else 0
        tma = _tma(x, n, k)
        mask_rows = mp % plan.bm != 0
        a = b = cd = weight
        push_rows, push_cols = (64, 256) if cuda else (16, 16)
        tma_push = tma and plan.comm > 0 and block % push_rows == 0 and mp % push_rows == 0
        if tma_push:
            chunk_k = cdiv(chunk_k, push_cols) * push_cols
            chunks = cdiv(k, chunk_k)
        peers = [x] * 8
        if tma_push:
            ordered = view(
                work.descriptors,
                ("push", turn.half, m, k, x.dtype),
                lambda: [_desc(buffers[(rank - step) % tp], push_rows, push_cols) for step in range(1, tp)],
            )
            peers = [_desc(x, push_rows, push_cols), *ordered, *[ordered[0]] * (8 - tp)]
        if tma:
            a = view(
                work.descriptors,
                ("a", turn.half, m, k, x.dtype, plan.bm, plan.bk),
                lambda: _desc(gathered, plan.bm, plan.bk),
            )
            b = _desc(weight, plan.bk, plan.bn) if transposed else _desc(weight, plan.bn, plan.bk)
            cd = _desc(c, plan.bm, plan.bn // 2 if plan.split else plan.bn)
        else:
            a = gathered
        by_triton(
            ag_gemm_kernel,
            sms,
            a,
            b,
            cd,
            c,
            *peers,
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
            flag_off,
            turn.half * (work.half_bytes // x.element_size()),
            m,
            n,
            k,
            mp,
            rank,
            blocks,
            block,
            chunk_k,
            TP=tp,
            BM=plan.bm,
            BN=plan.bn,
            BK=plan.bk,
            GROUP=plan.group,
            KCH=chunks,
            COMM=plan.comm,
            SKIP=skip,
            LANES=lanes,
            PR=push_rows if tma_push else 8 if cuda else 2,
            PC=push_cols if tma_push else 2048 if cuda else 64,
            TMA_PUSH=tma_push,
            CTAS=sms,
            TRANSPOSED=transposed,
            TMA=tma,
            MASK_ROWS=mask_rows,
            SPLIT=plan.split,
            BIAS=bias is not None,
            CPU=not cuda,
            THREADS=32 * plan.warps,
            DTYPE=TYPES[x.dtype],
            num_stages=plan.stages,
            num_warps=plan.warps,
        )
        if finish is not None:
            finish()
        work.end()
    return c, gathered


def _hopper_all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    work: Slab,
    plan: KernelConfig,
    sms: int,
    transposed: bool,
    bias: torch.Tensor | None,
    return_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron_flux.ops.launch import hopper as launch_hopper

    mp, k = x.shape
    n = weight.shape[1] if transposed else weight.shape[0]
    c = torch.empty((mp * work.tp, n), dtype=x.dtype, device=x.device)
    with unbroken(work, "all_gather_gemm"):
        turn = begin(work)
        buffers = buffers_of(work, turn.half, mp * work.tp, k, x.dtype)
        finish = None
        if plan.comm == 0:
            flag_off = turn.half * FLAG_WORDS + ENTER_WORDS
            finish = copy_engine_push(x, work, turn, buffers, flag_off, mp, plan.pace, plan.edges(k))
        launch_hopper.all_gather_gemm(
            x, weight, c, work, turn, buffers[work.rank], plan, sms, transposed, bias, return_gathered
        )
        if finish is not None:
            finish()
        work.end()
    return c, buffers[work.rank]


def gemm_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, work: Slab, plan: KernelConfig, *, transposed: bool
) -> torch.Tensor:
    """``[mp, n]`` for x ``[m, k]``."""
    m, k = x.shape
    tp, rank = work.tp, work.rank
    mp, n = m // tp, weight.shape[1] if transposed else weight.shape[0]
    cuda = x.is_cuda
    sms = sm_count(x.device)
    reducers = min(plan.reducers, sms - 1)
    if rs_tiles(mp, n, plan) * tp > CALL_FLAGS:
        raise UserError(f"gemm_reduce_scatter: too many tiles for {mp} x {n} with plan {plan.label()}")
    out = torch.empty((mp, n), dtype=x.dtype, device=x.device)
    if plan.ws:
        from megatron_flux.ops.launch import hopper as launch_hopper

        with unbroken(work, "gemm_reduce_scatter"):
            turn = begin(work)
            launch_hopper.gemm_reduce_scatter(x, weight, out, work, turn, plan, sms, transposed)
            work.end()
        return out
    with unbroken(work, "gemm_reduce_scatter"):
        turn = begin(work)
        tma = _tma(x, n, k)
        width = plan.bn // 2 if plan.split else plan.bn
        rows = 2 * work.half_bytes // (plan.bn * x.element_size())
        spaces = view(
            work.descriptors, ("rs", plan.bn, x.dtype), lambda: [d.view(x.dtype).view(rows, plan.bn) for d in work.data]
        )
        a, b, sinks = x, weight, [out] * 8
        if tma:
            a = _desc(x, plan.bm, plan.bk)
            b = _desc(weight, plan.bk, plan.bn) if transposed else _desc(weight, plan.bn, plan.bk)
            by_rank = view(
                work.descriptors,
                ("rs-desc", plan.bm, plan.bn, width, x.dtype),
                lambda: [_desc(s, plan.bm, width) for s in spaces],
            )
            sinks = [by_rank[(rank + 1 + step % tp) % tp] for step in range(8)]
        by_triton(
            gemm_rs_kernel,
            sms,
            a,
            b,
            *sinks,
            work.data_table,
            work.flag_table,
            work.flags[rank],
            spaces[rank],
            out,
            work.ctrl,
            work.epochs,
            work.alarm.words,
            work.alarm.limit,
            turn.half,
            turn.next_half,
            turn.half * FLAG_WORDS + ENTER_WORDS,
            turn.half * (rows // 2),
            m,
            n,
            k,
            mp,
            rank,
            sms - reducers,
            TP=tp,
            BM=plan.bm,
            BN=plan.bn,
            BK=plan.bk,
            BAND=plan.band,
            CTAS=sms,
            CHUNK=min(8192, plan.bm * plan.bn // 4),
            PIECES=2,
            TRANSPOSED=transposed,
            TMA=tma,
            SPLIT=plan.split,
            JOIN=cuda,
            CPU=not cuda,
            THREADS=32 * plan.warps,
            DTYPE=TYPES[x.dtype],
            num_stages=plan.stages,
            num_warps=plan.warps,
        )
        work.end()
    return out


def _copy_by_sms(target: torch.Tensor, source: torch.Tensor) -> None:
    """A kernel and not a memcpy: the copy engines are busy with the peers' shards."""
    bits = {2: torch.int16, 4: torch.int32}[source.element_size()]
    torch.bitwise_or(source.view(bits), 0, out=target.view(bits))


def _desc(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, cols])


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
    return x.is_cuda and _capability(x.device) == (9, 0) and _tma(x, n, k) and whole_tiles


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _hopper(device: torch.device) -> bool:
    if device.type != "cuda":
        return os.environ.get("MEGATRON_FLUX_TWIN_TMA", "1") == "1"
    return _capability(device) >= (9, 0)


def _tma(x: torch.Tensor, n: int, k: int) -> bool:
    """Whether TMA can address aligned operands: Hopper, rows of whole 16 bytes."""
    size = x.element_size()
    return _hopper(x.device) and n * size % ALIGNMENT == 0 and k * size % ALIGNMENT == 0
