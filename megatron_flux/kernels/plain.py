"""The fused kernels in Triton, for every GPU and for Triton's interpreter: each one persistent kernel.

``tp`` ranks have ``mp = m/tp`` rows each. ``b`` is ``[n, k]``, or ``[k, n]`` if TRANSPOSED.

All-gather + GEMM: ``c = all_gather(x) @ w``
    Shapes: ``x`` ``[mp, k]`` and ``b`` are local, ``c`` is ``[m, n]``. ``a`` is this rank's gather buffer ``[m, k]``,
    which every rank writes to. Flags: ``[tp]``, word ``r`` set once the shard of rank ``r`` has arrived.

    Schedule: the local shard, which is in the buffer before the launch, comes first, then those of rank+1, rank+2, …:
    the order in which they arrive. A tile waits for its shard; nothing waits when the kernel begins. The copy engine
    moves the shards (:mod:`megatron_flux.comm.copy_engine`), which takes no SM from the GEMM.

    Bitwise deterministic, and bit-equal to the same kernel on a gathered input: the order of the k loop is fixed.

    Hazards
    * The copies must be enqueued before the kernel, or one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) deadlocks.
    * Another *kernel* must never publish a flag that this one waits for while it occupies every SM.
    * Rows that do not fill a tile are computed from the memory behind them and masked at the store (MASK_ROWS).

    Measured (4 x H200, results/ops-h200x4-nvlink-triton): pushes by some SMs of this kernel reached 18-26 GB/s per SM
    and lost to the copy engine in all but one of eight tuned calls (m=8192, n=2048, k=8192, which Hopper's own kernel
    now runs faster than either); copies paced to one writer per receiver were within 3 % of unpaced ones. Both were
    removed.

GEMM + reduce-scatter, and all-reduce: ``out[local rows] = sum over ranks of x_r @ w_r``
    With STEPS = TP a tile has one destination, the rank that owns its rows. With STEPS = 1 it goes to all ranks, each
    of which adds all partials: an all-reduce in one shot, with ``mp = m``.

    Shapes: ``a`` ``[m, k]`` and ``b`` are local, ``out`` ``[mp, n]`` too. The workspace of every rank is
    ``[tp, tiles, BM, BN]``: slot ``r`` holds rank ``r``'s partials of this rank's tiles, each tile contiguous.
    Flags: ``[tiles, tp]``, word ``(t, r)`` set by rank ``r`` once it has written tile ``t``.

    Schedule: CTAs ``0 … gemm_ctas-1`` compute a share of the tiles each. They take BAND row blocks per
    destination at a time, for *all* destinations: every link is then evenly busy from beginning to end, and a row block
    is complete on its owner early, so that its reduction hides behind the row blocks that follow. In the last band
    remote tiles come first. A CTA that has finished takes the share of one that has not started. A finished tile leaves
    at once by an asynchronous TMA store into the owner's workspace; its flag is written one or two tiles later, when
    the store has long arrived. No CTA waits for a store. The remaining CTAs, and every CTA that has run out of tiles,
    reduce: they take pieces of local tiles in order from a counter, wait for the tile's ``tp`` flags and add the
    partials in fp32, in rank order.

    Bitwise deterministic: one fixed order of summation, which depends neither on arrival nor on the schedule. Every
    partial is rounded once to the element type, the sum once more. Nothing needs zeroing.

    Hazards
    * A CTA may find no SM, because a kernel of another process group holds it. So no CTA waits for a peer before all
      shares have been taken, and a peer that waits for this rank's tiles gets them, however few CTAs run.
    * The workspace is reused two calls later (see :mod:`megatron_flux.comm.slab`).

    Measured (4 x H200, results/ops-h200x4-nvlink-triton): 128 of 132 SMs compute: with 128 x 256 tiles the usual shapes
    give multiples of 128 tiles, so that 128 SMs need no more waves than 132 do, and four SMs are free to reduce;
    124 + 8 were slower wherever 128 divides the tiles. A store and a system fence per tile cost 2 of its 70 us
    (m=8192, n=12288, k=6144): two tiles share one fence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.device import (
    MOST_CTAS,
    OP_AG,
    OP_AR,
    OP_RS,
    bulk_stores_done,
    leave,
    multiply,
    publish,
    raster,
    release_fence,
    rounded_product,
    scatter_place,
    split_columns,
    take,
    wait_flags,
)


@triton.jit
def _row_of(bias, col, n, BN: tl.constexpr):
    """``bias[col:col+BN]`` as a row."""
    cols = col + tl.arange(0, BN)
    return tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit", "m", "mp"])
def ag_gemm_kernel(
    a, b, c, bias, xs, ws, flags, ctrl, epochs, err, limit, slot, next_slot, flag_off, m, n, k, mp, ld, ldw, rank,
    TP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, CTAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr, MASK_ROWS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr,
    CPU: tl.constexpr, THREADS: tl.constexpr, DTYPE: tl.constexpr, SCALES: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """See the module. ``bias`` ``[n]`` is added before rounding, if ``BIAS``. With ``TMA`` ``a`` and ``b`` are
    descriptors, else pointers; so is ``c``, but a pointer with ``MASK_ROWS``. ``SCALES`` of FP8 operands: None,
    "tensor" (``xs[0] * ws[0]``) or "blocks": ``xs`` ``[tp, ceil(k / 128), ld]``, ``ws`` ``[ceil(n / 128), ldw]``.
    """
    epoch = tl.load(epochs + slot)
    nrb = tl.cdiv(mp, BM)
    npn = tl.cdiv(n, BN)
    kt = tl.cdiv(k, BK)
    for t in tl.range(tl.program_id(0), nrb * npn * TP, CTAS):
        src = (rank + t // (nrb * npn)) % TP
        pm, pn = raster(t % (nrb * npn), nrb, npn, GROUP)
        row = src * mp + pm * BM
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if BIAS and SCALES is None:
            acc += _row_of(bias, pn * BN, n, BN)
        if src != rank:
            wait_flags(flags + flag_off + src, 1, 1, epoch, err, limit, OP_AG, src, 0, CPU, THREADS)
        by_row = xs
        if SCALES == "blocks":
            by_row += src * tl.cdiv(k, 128) * ld + pm * BM
        acc = multiply(
            acc, a, b, row, pn * BN, kt, m, n, k, BM, BN, BK, TRANSPOSED, TMA, CPU, by_row, ld, mp - pm * BM, ws, ldw,
            SCALES, PROMOTE,
        )  # fmt: skip
        if SCALES == "tensor":
            acc = rounded_product(acc, tl.load(xs) * tl.load(ws), CPU)
        if BIAS and SCALES is not None:
            acc += _row_of(bias, pn * BN, n, BN)
        if TMA and not MASK_ROWS:
            if SPLIT:
                left, right = split_columns(acc, BM, BN)
                c.store([row, pn * BN], left.to(DTYPE))
                c.store([row, pn * BN + BN // 2], right.to(DTYPE))
            else:
                c.store([row, pn * BN], acc.to(DTYPE))
        else:
            rows = pm * BM + tl.arange(0, BM)
            cols = pn * BN + tl.arange(0, BN)
            offs = (src * mp + rows).to(tl.int64)[:, None] * n + cols[None, :]
            tl.store(c + offs, acc.to(DTYPE), mask=(rows < mp)[:, None] & (cols < n)[None, :])
    leave(ctrl, epochs, epoch, next_slot, CTAS)


@triton.jit
def _send(desc, acc, row, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    if SPLIT:
        left, right = split_columns(acc, BM, BN)
        desc.store([row, 0], left.to(DTYPE))
        desc.store([row, BN // 2], right.to(DTYPE))
    else:
        desc.store([row, 0], acc.to(DTYPE))


@triton.jit
def _announce(flag_table, owner, flag, epoch, TP: tl.constexpr, STEPS: tl.constexpr):
    """Publish a tile's flag to its owner; with one step, to all ranks."""
    if STEPS == 1:
        for to in tl.static_range(TP):
            publish(tl.load(flag_table + to), flag, epoch, "relaxed")
    else:
        publish(owner, flag, epoch, "relaxed")


@triton.jit
def _left(taken, shares, epoch):
    """Take the last share that its own CTA has not; ``shares`` if there is none."""
    lane = tl.arange(0, MOST_CTAS)
    share = shares
    last = shares * 0
    while (share == shares) & (last >= 0):
        seen = tl.load(taken + lane, mask=lane < shares, other=0, cache_modifier=".cg")
        last = tl.max(tl.where((lane < shares) & (seen != epoch), lane, -1), 0)
        if last >= 0:
            if take(taken, last, epoch):
                share = last
    return share


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit", "m", "mp"])
def gemm_rs_kernel(
    a, b, d0, d1, d2, d3, d4, d5, d6, d7, xs, ws, addend, data_table, flag_table, flags, recv, out, ctrl, epochs, err,
    limit,
    slot, next_slot, flag_off, row_off, m, n, k, mp, ld, ldw, rank, gemm_ctas,
    TP: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr,
    CTAS: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
    SPLIT: tl.constexpr, CPU: tl.constexpr, THREADS: tl.constexpr, DTYPE: tl.constexpr,
    SCALES: tl.constexpr, PROMOTE: tl.constexpr, ADDEND: tl.constexpr,
):  # fmt: skip
    """See the module. ``d0`` … ``d7`` are the workspaces of the destinations by step (repeated beyond TP). ``SCALES``
    as of :func:`ag_gemm_kernel`, with ``xs`` ``[ceil(k / 128), ld]``. With ADDEND ``addend`` ``[m, n]`` is added to
    this rank's product before it is rounded.
    """
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
    share = tl.program_id(0)
    if share < gemm_ctas:
        share = tl.where(take(ctrl + 2, share, epoch), share, gemm_ctas)
    while share < gemm_ctas:
        for t in tl.range(share, tiles * STEPS, gemm_ctas):
            step, rb, pn = scatter_place(t, nrb, npn, BAND, STEPS)
            dst = (rank + 1 + step) % STEPS
            next_owner = tl.load(flag_table + dst)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            first_row = dst * mp + rb * BM
            by_row = xs
            if SCALES == "blocks":
                by_row += first_row
            acc = multiply(
                acc, a, b, first_row, pn * BN, kt, m, n, k, BM, BN, BK, TRANSPOSED, TMA, CPU, by_row, ld, m - first_row,
                ws, ldw, SCALES, PROMOTE,
            )  # fmt: skip
            if SCALES == "tensor":
                acc *= tl.load(xs) * tl.load(ws)
            if ADDEND:
                rows = rb * BM + tl.arange(0, BM)
                cols = pn * BN + tl.arange(0, BN)
                at = (dst * mp + rows).to(tl.int64)[:, None] * n + cols[None, :]
                acc += tl.load(addend + at, mask=(rows < mp)[:, None] & (cols < n)[None, :], other=0.0).to(tl.float32)
            if flag1 >= 0:
                bulk_stores_done(CPU, THREADS)
                tl.debug_barrier()
                release_fence(CPU, THREADS)
                _announce(flag_table, owner0, flag0, epoch, TP, STEPS)
                _announce(flag_table, owner1, flag1, epoch, TP, STEPS)
                flag0 = flag1 * 0 - 1
                flag1 = flag0
            tile = rb * npn + pn
            row = row_off + (rank * tiles + tile) * BM
            if TMA:
                for to in tl.static_range(TP):
                    if STEPS == 1:
                        _send(sinks[to], acc, row, BM, BN, SPLIT, DTYPE)
                    elif step == to:
                        _send(sinks[to], acc, row, BM, BN, SPLIT, DTYPE)
            else:
                offs = row.to(tl.int64) * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
                for to in tl.static_range(TP // STEPS):
                    tl.store(tl.load(data_table + dst + to).to(tl.pointer_type(DTYPE)) + offs, acc.to(DTYPE))
            if flag0 < 0:
                flag0 = flag_off + tile * TP + rank
                owner0 = next_owner
            else:
                flag1 = flag_off + tile * TP + rank
                owner1 = next_owner
        share = _left(ctrl + 2, gemm_ctas, epoch)
    if flag0 >= 0:
        bulk_stores_done(CPU, THREADS)
        tl.debug_barrier()
        release_fence(CPU, THREADS)
        _announce(flag_table, owner0, flag0, epoch, TP, STEPS)
        if flag1 >= 0:
            _announce(flag_table, owner1, flag1, epoch, TP, STEPS)

    ticket = tl.atomic_add(ctrl, 1, sem="relaxed", scope="gpu")
    while ticket < tiles * PIECES:
        following = tl.atomic_add(ctrl, 1, sem="relaxed", scope="gpu")  # its latency hides behind the piece
        tile = ticket // PIECES
        if STEPS == 1:  # in the order in which tiles are multiplied
            _, rb, pn = scatter_place(tile, nrb, npn, BAND, STEPS)
            tile = rb * npn + pn
        piece = ticket % PIECES
        OP: tl.constexpr = OP_AR if STEPS == 1 else OP_RS
        wait_flags(flags + flag_off + tile * TP, TP, TP, epoch, err, limit, OP, -1, tile, CPU, THREADS)
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
