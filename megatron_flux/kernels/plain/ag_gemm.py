"""All-gather + GEMM as one persistent kernel: ``c = all_gather(x) @ w``.

Shapes (``tp`` ranks, ``mp = m/tp`` rows each)
    ``x`` ``[mp, k]`` and ``b`` ``[n, k]`` (``[k, n]`` if TRANSPOSED) are local, ``c`` is ``[m, n]``. ``a`` is this
    rank's gather buffer ``[m, k]``; every rank's is written by all. A shard travels as ``blocks`` blocks of
    ``block_rows`` rows, each block as KCH chunks of columns. Flags: ``[tp, blocks, KCH, LANES]``, set by rank ``r`` in
    row ``r``.

Schedule
    The own shard (put into the buffer before the launch) is first, then block 0 of rank+1, rank+2, …, block 1 of
    rank+1, …: the order in which blocks arrive. A tile waits for its block, once per chunk of columns; nothing waits at
    entry. Who moves the blocks:
    * COMM = 0: the copy engine, enqueued before the kernel (LANES = 1). Costs no SM; at its best with large blocks and
      one
      writer per receiver.
    * COMM > 0: the first COMM CTAs, each a strip of rows of every block, written to all peers in turn so that every
      link
      is evenly busy. They sit out the first SKIP rounds of tiles and then compute like the others.

Guarantees
    Bitwise deterministic, and bit-equal to the same kernel on a gathered input: the order of the k loop is fixed.

Hazards
    * Copies by the copy engine must be enqueued before the kernel, or one hardware queue
      (CUDA_DEVICE_MAX_CONNECTIONS=1)
      deadlocks; a flag must never be published by another *kernel* while this one occupies every SM.
    * Rows that do not fill a tile are computed from whatever follows them and masked at the store (MASK_ROWS).
    * The main loop restarts at every chunk: more chunks start earlier and run slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.plain.device import OP_AG, bulk_stores_done, leave, multiply, publish, raster, wait_flags


@triton.jit
def _push(
    x,
    data_table,
    flag_table,
    buf_off,
    flag_off,
    rank,
    epoch,
    mp,
    k,
    blocks,
    block_rows,
    chunk_k,
    pid,
    TP: tl.constexpr,
    KCH: tl.constexpr,
    COMM: tl.constexpr,
    LANES: tl.constexpr,
    PR: tl.constexpr,
    PC: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Send the CTA's strip of rows of every block and chunk to every peer, through registers."""
    # Addresses first: a lookup between the stores would cost a round trip each.
    d1 = tl.load(data_table + (rank + TP - 1) % TP)
    d2 = tl.load(data_table + (rank + TP - 2) % TP)
    d3 = tl.load(data_table + (rank + 2 * TP - 3) % TP)
    d4 = tl.load(data_table + (rank + 2 * TP - 4) % TP)
    d5 = tl.load(data_table + (rank + 3 * TP - 5) % TP)
    d6 = tl.load(data_table + (rank + 3 * TP - 6) % TP)
    d7 = tl.load(data_table + (rank + 4 * TP - 7) % TP)
    strip = tl.cdiv(block_rows, COMM)
    shard = buf_off + (rank * mp).to(tl.int64) * k
    for j in range(0, blocks):
        top = j * block_rows
        r_from = top + pid * strip
        r_to = min(min(r_from + strip, top + block_rows), mp)
        for kc in range(0, KCH):
            c_to = min((kc + 1) * chunk_k, k)
            for r0 in range(r_from, r_to, PR):
                rows = r0 + tl.arange(0, PR)
                for c0 in range(kc * chunk_k, c_to, PC):
                    cols = c0 + tl.arange(0, PC)
                    mask = (rows < r_to)[:, None] & (cols < c_to)[None, :]
                    offs = rows.to(tl.int64)[:, None] * k + cols[None, :]
                    block = tl.load(x + offs, mask=mask)
                    offs += shard
                    tl.store(d1.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
                    if TP > 2:
                        tl.store(d2.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
                        tl.store(d3.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
                    if TP > 4:
                        tl.store(d4.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
                        tl.store(d5.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
                        tl.store(d6.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
                        tl.store(d7.to(tl.pointer_type(DTYPE)) + offs, block, mask=mask)
            tl.debug_barrier()
            for step in tl.static_range(1, TP):
                peer = tl.load(flag_table + (rank + TP - step) % TP)
                publish(peer, flag_off + ((rank * blocks + j) * KCH + kc) * LANES + pid, epoch, "release")


@triton.jit
def _push_tiles(
    xd,
    p1,
    p2,
    p3,
    p4,
    p5,
    p6,
    p7,
    flag_table,
    flag_off,
    rank,
    epoch,
    mp,
    blocks,
    block_rows,
    chunk_k,
    pid,
    TP: tl.constexpr,
    KCH: tl.constexpr,
    COMM: tl.constexpr,
    LANES: tl.constexpr,
    PR: tl.constexpr,
    PC: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Send the CTA's share of the tiles of every block and chunk by TMA; ``block_rows`` is a multiple of ``PR``."""
    down = block_rows // PR
    tiles = down * (chunk_k // PC)
    for unit in range(0, blocks * KCH):
        j = unit // KCH
        kc = unit % KCH
        for t in range(pid, tiles, COMM):
            row = j * block_rows + (t % down) * PR
            col = kc * chunk_k + (t // down) * PC
            tile = xd.load([row, col])
            row += rank * mp
            p1.store([row, col], tile)
            if TP > 2:
                p2.store([row, col], tile)
                p3.store([row, col], tile)
            if TP > 4:
                p4.store([row, col], tile)
                p5.store([row, col], tile)
                p6.store([row, col], tile)
                p7.store([row, col], tile)
        bulk_stores_done(CPU, THREADS)
        tl.debug_barrier()
        for step in tl.static_range(1, TP):
            peer = tl.load(flag_table + (rank + TP - step) % TP)
            publish(peer, flag_off + ((rank * blocks + j) * KCH + kc) * LANES + pid, epoch, "release")


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit", "blocks"])
def ag_gemm_kernel(
    a,
    b,
    c,
    c_ptr,
    xd,
    p1,
    p2,
    p3,
    p4,
    p5,
    p6,
    p7,
    x,
    bias,
    data_table,
    flag_table,
    flags,
    ctrl,
    epochs,
    err,
    limit,
    slot,
    next_slot,
    flag_off,
    buf_off,
    m,
    n,
    k,
    mp,
    rank,
    blocks,
    block_rows,
    chunk_k,
    TP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    KCH: tl.constexpr,
    COMM: tl.constexpr,
    SKIP: tl.constexpr,
    LANES: tl.constexpr,
    PR: tl.constexpr,
    PC: tl.constexpr,
    TMA_PUSH: tl.constexpr,
    CTAS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """See the module. ``bias`` ``[n]`` is added before rounding, if ``BIAS``."""
    pid = tl.program_id(0)
    epoch = tl.load(epochs + slot)
    if COMM > 0:
        if pid < COMM:
            if TMA_PUSH:
                _push_tiles(
                    xd, p1, p2, p3, p4, p5, p6, p7, flag_table, flag_off, rank, epoch, mp, blocks, block_rows, chunk_k,
                    pid, TP, KCH, COMM, LANES, PR, PC, CPU, THREADS,
                )  # fmt: skip
            else:
                _push(
                    x, data_table, flag_table, buf_off, flag_off, rank, epoch, mp, k, blocks, block_rows, chunk_k,
                    pid, TP, KCH, COMM, LANES, PR, PC, DTYPE,
                )  # fmt: skip
    npn = tl.cdiv(n, BN)
    rows_per_block = tl.cdiv(block_rows, BM)
    per = rows_per_block * npn
    total = per * blocks * TP
    kt = tl.cdiv(k, BK)
    # Rounds: in the first SKIP only the CTAs that do not push take tiles; SKIP < 0 means always.
    early = CTAS - COMM
    if SKIP < 0:
        begin = pid - COMM if pid >= COMM else total
        rounds = tl.cdiv(tl.maximum(total - begin, 0), early)
        start = 0
    else:
        begin = 0
        start = 0 if pid >= COMM else SKIP
        rounds = SKIP + tl.cdiv(tl.maximum(total - SKIP * early - pid, 0), CTAS)
    for turn in tl.range(start, rounds):
        if SKIP < 0:
            t = begin + turn * early
        else:
            t = turn * early + pid - COMM if turn < SKIP else SKIP * early + (turn - SKIP) * CTAS + pid
        q = t // per
        src = rank
        j = q
        if q >= blocks:
            j = (q - blocks) // (TP - 1)
            src = (rank + 1 + (q - blocks) % (TP - 1)) % TP
        pm, pn = raster(t % per, rows_per_block, npn, GROUP)
        row = src * mp + j * block_rows + pm * BM
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if BIAS:
            cols = pn * BN + tl.arange(0, BN)
            acc += tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        for kc in range(0, KCH):
            if src != rank:
                first = flag_off + ((src * blocks + j) * KCH + kc) * LANES
                wait_flags(
                    flags + first, LANES, max(COMM, 1), epoch, err, limit, OP_AG, src, j * KCH + kc, CPU, THREADS
                )
            acc = multiply(
                acc, a, b, row, pn * BN, kc * (chunk_k // BK), min((kc + 1) * (chunk_k // BK), kt), m, n, k,
                BM, BN, BK, TRANSPOSED, TMA, CPU,
            )  # fmt: skip
        if TMA and not MASK_ROWS:
            if SPLIT:
                left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
                c.store([row, pn * BN], left.to(DTYPE))
                c.store([row, pn * BN + BN // 2], right.to(DTYPE))
            else:
                c.store([row, pn * BN], acc.to(DTYPE))
        else:
            rows = pm * BM + tl.arange(0, BM)
            cols = pn * BN + tl.arange(0, BN)
            inside = (j * block_rows + rows < mp)[:, None] & (cols < n)[None, :]
            offs = (src * mp + j * block_rows + rows).to(tl.int64)[:, None] * n + cols[None, :]
            tl.store(c_ptr + offs, acc.to(DTYPE), mask=inside)
    leave(ctrl, epochs, epoch, next_slot, CTAS)
