"""GEMM + reduce-scatter as one persistent kernel: ``out[own rows] = sum over ranks of x_r @ w_r``.

Shapes (``tp`` ranks, ``mp = m/tp`` rows each)
    ``a`` ``[m, k]`` and ``b`` ``[n, k]`` (``[k, n]`` if TRANSPOSED) are local. ``out`` ``[mp, n]`` is local.
    The workspace of every rank is ``[tp, tiles, BM, BN]``: slot ``r`` holds what rank ``r`` computed for this rank's
    own tiles, each tile contiguous. Flags: ``[tiles, tp]``, word ``(t, r)`` set by rank ``r`` once it has written tile
    ``t``.

Schedule
    CTAs ``0 … gemm_ctas-1`` compute. They take BAND row blocks per destination at a time, for *all* destinations: every
    link is then evenly busy from beginning to end, and a row block is complete on its owner early, so that its
    reduction hides behind the row blocks that follow. In the last band remote tiles come first.
    A finished tile leaves at once by an asynchronous TMA store into the owner's workspace; its flag is written one
    or two tiles later, when the store has long arrived. No CTA waits for a store.
    The remaining CTAs, and every CTA that has run out of tiles, reduce: they take pieces of own tiles in order from a
    counter, wait for the tile's ``tp`` flags and add the partials in fp32, in rank order.

Guarantees
    Bitwise deterministic: one fixed order of summation, which depends neither on arrival nor on the schedule. Every
    partial is rounded once to the element type, the sum once more. Nothing needs zeroing.

Hazards
    * All CTAs must be resident together (grid <= number of SMs, one per SM). Those that compute never wait for those
      that reduce, so CTAs that start late only delay.
    * The workspace is reused two calls later (see :mod:`megatron_flux.comm.slab`).
    * Triton's interpreter runs CTAs one after the other: there only the last CTAs may reduce (JOIN off).

Measured (4 x H200, results/ops-h200x4-nvlink-triton)
    128 of 132 SMs compute: with 128 x 256 tiles the usual shapes give multiples of 128 tiles, so that 128 SMs need no
    more waves than 132 do, and four SMs are free to reduce; 124 + 8 were slower wherever 128 divides the tiles. A
    store and a system fence per tile cost 2 of its 70 us (m=8192, n=12288, k=6144): two tiles share one fence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.device import (
    OP_RS,
    bulk_stores_done,
    leave,
    multiply,
    publish,
    release_fence,
    scatter_place,
    split_columns,
    wait_flags,
)


@triton.jit
def _send(desc, acc, row, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    if SPLIT:
        left, right = split_columns(acc, BM, BN)
        desc.store([row, 0], left.to(DTYPE))
        desc.store([row, BN // 2], right.to(DTYPE))
    else:
        desc.store([row, 0], acc.to(DTYPE))


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit"])
def gemm_rs_kernel(
    a,
    b,
    d0,
    d1,
    d2,
    d3,
    d4,
    d5,
    d6,
    d7,
    data_table,
    flag_table,
    flags,
    recv,
    out,
    ctrl,
    epochs,
    err,
    limit,
    slot,
    next_slot,
    flag_off,
    row_off,
    m,
    n,
    k,
    mp,
    rank,
    gemm_ctas,
    TP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
    CTAS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
    JOIN: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """See the module. ``d0`` … ``d7`` are the workspaces of the destinations by step (repeated beyond TP)."""
    pid = tl.program_id(0)
    sinks = (d0, d1, d2, d3, d4, d5, d6, d7)
    epoch = tl.load(epochs + slot)
    nrb = tl.cdiv(mp, BM)
    npn = tl.cdiv(n, BN)
    tiles = nrb * npn
    kt = tl.cdiv(k, BK)
    # Flags of up to two tiles whose stores are under way: publishing costs a system fence, two tiles share it.
    flag0 = tl.zeros((), tl.int32) - 1
    flag1 = tl.zeros((), tl.int32) - 1
    owner0 = tl.load(flag_table + rank)
    owner1 = owner0
    first = pid if pid < gemm_ctas else tiles * TP
    for t in tl.range(first, tiles * TP, gemm_ctas):
        step, rb, pn = scatter_place(t, nrb, npn, BAND, TP)
        dst = (rank + 1 + step) % TP
        next_owner = tl.load(flag_table + dst)
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        acc = multiply(acc, a, b, dst * mp + rb * BM, pn * BN, kt, m, n, k, BM, BN, BK, TRANSPOSED, TMA, CPU)
        if flag1 >= 0:
            bulk_stores_done(CPU, THREADS)
            tl.debug_barrier()
            release_fence(CPU, THREADS)
            publish(owner0, flag0, epoch, "relaxed")
            publish(owner1, flag1, epoch, "relaxed")
            flag0 = flag1 * 0 - 1
            flag1 = flag0
        tile = rb * npn + pn
        row = row_off + (rank * tiles + tile) * BM
        if TMA:
            for to in tl.static_range(TP):
                if step == to:
                    _send(sinks[to], acc, row, BM, BN, SPLIT, DTYPE)
        else:
            base = tl.load(data_table + dst).to(tl.pointer_type(DTYPE)) + row.to(tl.int64) * BN
            offs = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(base + offs, acc.to(DTYPE))
        if flag0 < 0:
            flag0 = flag_off + tile * TP + rank
            owner0 = next_owner
        else:
            flag1 = flag_off + tile * TP + rank
            owner1 = next_owner
    if flag0 >= 0:
        bulk_stores_done(CPU, THREADS)
        tl.debug_barrier()
        release_fence(CPU, THREADS)
        publish(owner0, flag0, epoch, "relaxed")
        if flag1 >= 0:
            publish(owner1, flag1, epoch, "relaxed")

    if JOIN or pid >= gemm_ctas:
        ticket = tl.atomic_add(ctrl, 1, sem="relaxed", scope="gpu")
        while ticket < tiles * PIECES:
            following = tl.atomic_add(ctrl, 1, sem="relaxed", scope="gpu")  # its latency hides behind the piece
            tile = ticket // PIECES
            piece = ticket % PIECES
            wait_flags(flags + flag_off + tile * TP, TP, TP, epoch, err, limit, OP_RS, -1, tile, CPU, THREADS)
            row0 = (tile // npn) * BM
            col0 = (tile % npn) * BN
            for part in tl.static_range(BM * BN // (CHUNK * PIECES)):
                e = (piece * (BM * BN // (CHUNK * PIECES)) + part) * CHUNK + tl.arange(0, CHUNK)
                total = tl.zeros((CHUNK,), dtype=tl.float32)
                for src in tl.static_range(TP):
                    from_src = recv + (row_off + (src * tiles + tile) * BM).to(tl.int64) * BN
                    total += tl.load(from_src + e, cache_modifier=".cg").to(tl.float32)
                r = row0 + e // BN
                c = col0 + e % BN
                tl.store(out + r.to(tl.int64) * n + c, total.to(DTYPE), mask=(r < mp) & (c < n))
            ticket = following
    leave(ctrl, epochs, epoch, next_slot, CTAS)
