"""All-gather + GEMM, warp-specialised for Hopper: ``c = all_gather(x) @ w``.

Shapes, guarantees and the copy engine's flags are those of :mod:`megatron_flux.kernels.plain`. The kinds of warps
(*load*, *aux*, …) are those of :mod:`megatron_flux.kernels.hopper.pieces`. This module says what differs.

Operands
    Tiles of the local shard read ``x`` itself, so nothing is copied before the kernel. While tensor cores multiply,
    *aux* copies the local shard into the gather buffer if the caller wants the gathered input (KEEP). Or it copies all
    shards, as they arrive, into the caller's own memory (OWN).

Rows
    A shard has at least BM rows. If its last tile would reach beyond the shard, that tile begins earlier. Rows that
    are then in two tiles are computed twice, with the same bits: such calls divide no tile along k.

Flags
    The copy engine moves the shards; its copies are enqueued before the kernel. Flags: ``[tp]``. They are ``[tp, 2]``
    if the first two shards to arrive (EARLY) or the last one (LATE) come in two pieces of columns. Pushes by the SMs
    were at most 0.9 % faster than the next best plan and up to 10 % slower (results/layer-h200x4-nvlink,
    layer-h200x4-more).

Schedule
    The local shard comes first, then the first shard to arrive. The others follow SPAN shards at a time, as they
    arrive, with interleaved row blocks, which reads the weight less often. *load* waits for a piece of columns only
    when it needs it; meanwhile the product goes on with what has arrived.

Hazards
    * After a poll of a flag, a proxy fence must come before TMA reads the data that the flag announces.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megatron_flux.kernels.device import MOST_CTAS, OP_AG, leave, raster
from megatron_flux.kernels.hopper.pieces import (
    FENCE_PROXY,
    PIECE,
    advance,
    copy_out,
    each_thread,
    hand_over_tile,
    load_blocks,
    shared_memory,
    wait_flags,
)
from megatron_flux.kernels.hopper.scaled import product
from megatron_flux.kernels.hopper.split_k import finish_part, part_of


@gluon.jit
def _place(t, own, npn, rank, GROUP: gl.constexpr, SPAN: gl.constexpr, TP: gl.constexpr):
    """Return a tile's (source rank, row block within the shard, column block); a shard has ``own`` row blocks."""
    src = rank
    if t < own * npn:
        rb, pn = raster(t, own, npn, GROUP)
    else:
        u = t - own * npn
        src = (rank + 1 + u // (own * npn)) % TP
        rb, pn = raster(u % (own * npn), own, npn, GROUP)
        if SPAN > 1:
            if u >= own * npn:
                u -= own * npn
                first = u // (SPAN * own * npn) * SPAN
                shards = gl.minimum(TP - 2 - first, SPAN)
                r, pn = raster(u - first * own * npn, shards * own, npn, GROUP)
                src = (rank + 2 + first + r // own) % TP
                rb = r % own
    return src, rb, pn


@gluon.jit
def _first_row(rb, mp, BM: gl.constexpr):
    """Return where a row block of a shard begins."""
    return gl.minimum(rb * BM, mp - BM)


@gluon.jit
def _piece(
    src, kc, rank, KCH: gl.constexpr, TP: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr
):  # fmt: skip
    """Return the piece of a copied shard that has chunk ``kc`` of its columns: :class:`~comm.copy_engine.Edges`."""
    step = (src + TP - rank) % TP
    piece = kc * 0
    if EARLY:
        if step <= 2:
            piece = gl.minimum(kc, 1)
    if LATE:
        if (step == TP - 1) & ((step > 2) | (not EARLY)):
            piece = kc // (KCH - 1)
    return piece


@gluon.jit
def _load(
    s, a, xd, b, xs, gs, ws, flags, flag_off, epoch, err, limit, own, npn, kt, chunk_kt, mp, rank,
    left, parts, GROUP: gl.constexpr, KCH: gl.constexpr, TP: gl.constexpr, SPAN: gl.constexpr,
    EARLY: gl.constexpr, LATE: gl.constexpr, CTAS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    per_source: gl.constexpr = 2 if EARLY or LATE else 1
    slot = 0
    phase = 1
    arrived = rank * per_source  # not an alias of rank, which would not be carried through the loop
    tiles = own * npn * TP
    for unit in range(gl.program_id(0), tiles + left * (parts - 1), CTAS):
        t, first, last, _ = part_of(unit, tiles, kt, left, parts, SPLIT_K)
        src, rb, pn = _place(t, own, npn, rank, GROUP, SPAN, TP)
        row = _first_row(rb, mp, s.BM)
        if src == rank:
            slot, phase = load_blocks(
                s, xd, b, row, pn * s.BN, first, last, xs, 0, row, ws, slot, phase
            )  # fmt: skip
        else:
            for kc in range(KCH):
                flag = src * per_source + _piece(src, kc, rank, KCH, TP, EARLY, LATE)
                if flag != arrived:
                    wait_flags(flags + flag_off + flag, 1, epoch, err, limit, OP_AG, src, flag % per_source, 50)
                    each_thread(FENCE_PROXY, epoch)
                    arrived = flag
                slot, phase = load_blocks(
                    s, a, b, src * mp + row, pn * s.BN, gl.maximum(kc * chunk_kt, first),
                    gl.minimum((kc + 1) * chunk_kt, last), gs, src * kt, row, ws, slot, phase,
                )  # fmt: skip


@gluon.jit
def _store(
    s, c, own, npn, mp, rank, left, parts,
    GROUP: gl.constexpr, TP: gl.constexpr, SPAN: gl.constexpr, CTAS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 0
    tiles = own * npn * TP
    for unit in range(gl.program_id(0), tiles + left * (parts - 1), CTAS):
        t, _, _, hands_over = part_of(unit, tiles, tiles, left, parts, SPLIT_K)
        if hands_over:
            src, rb, pn = _place(t, own, npn, rank, GROUP, SPAN, TP)
            row = src * mp + _first_row(rb, mp, s.BM)
            for piece in gl.static_range(s.BN // PIECE):
                mbarrier.wait(s.ready.index(slot), phase)
                copy_out(c, [row, pn * s.BN + piece * PIECE], s.pieces.index(slot))
                tma.store_wait(0)
                mbarrier.arrive(s.free.index(slot), count=1)
                slot, phase = advance(slot, phase, s.RING)


@gluon.jit
def _copy_shard(
    source, to, own, mp, k, chunk_k, BM: gl.constexpr, KCH: gl.constexpr, WIDTH: gl.constexpr, CTAS: gl.constexpr
):  # fmt: skip
    dtype: gl.constexpr = source.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([128 // dtype.primitive_bitwidth], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, WIDTH, layout=layout)
    for unit in range(gl.program_id(0), own * KCH * BM, CTAS):
        row = (unit // (KCH * BM)) * BM + unit % BM
        col = ((unit // BM) % KCH) * chunk_k
        end = gl.minimum(col + chunk_k, k)
        at_row = row.to(gl.int64) * k
        for at in range(col, end, WIDTH):
            there = (at + lane < end) & (row < mp)
            value = gl.load(source + at_row + at + lane, mask=there, cache_modifier=".cg")
            gl.store(to + at_row + at + lane, value, mask=there)


@gluon.jit
def _keep(
    x, kept, data_table, buf_off, flags, flag_off, epoch, err, limit, own, mp, k, chunk_k, rank,
    BM: gl.constexpr, KCH: gl.constexpr, TP: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    WIDTH: gl.constexpr, KEEP: gl.constexpr, OWN: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Copy the local shard into the gather buffer, or all shards into ``kept``."""
    per_source: gl.constexpr = 2 if EARLY or LATE else 1
    size = mp.to(gl.int64) * k
    mine = gl.multiple_of(gl.load(data_table + rank).to(gl.pointer_type(x.dtype.element_ty)) + buf_off, 16)
    if OWN:
        _copy_shard(x, gl.multiple_of(kept + rank * size, 16), own, mp, k, chunk_k, BM, KCH, WIDTH, CTAS)
        for step in range(1, TP):
            src = (rank + step) % TP
            for last in gl.static_range(2):
                piece = _piece(src, last * (KCH - 1), rank, KCH, TP, EARLY, LATE)
                unit = src * per_source + piece
                wait_flags(flags + flag_off + unit, 1, epoch, err, limit, OP_AG, src, piece, 500)
                each_thread(FENCE_PROXY, epoch)
            whole = gl.multiple_of(mine + src * size, 16)
            _copy_shard(whole, gl.multiple_of(kept + src * size, 16), own, mp, k, chunk_k, BM, KCH, WIDTH, CTAS)
    elif KEEP:
        _copy_shard(x, gl.multiple_of(mine + rank * size, 16), own, mp, k, chunk_k, BM, KCH, WIDTH, CTAS)


@gluon.jit
def _multiply(
    s, own, npn, kt, bias, xs, ws, n, rank, left, parts, sums, summed, epoch, err, limit,
    GROUP: gl.constexpr, TP: gl.constexpr, SPAN: gl.constexpr, CTAS: gl.constexpr, BIAS: gl.constexpr,
    SPLIT_K: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 0
    slot_d = 0
    phase_d = 0
    scale = 0.0
    if s.SCALES == "tensor":
        scale = gl.load(xs) * gl.load(ws)
    tiles = own * npn * TP
    for unit in range(gl.program_id(0), tiles + left * (parts - 1), CTAS):
        t, first, last, hands_over = part_of(unit, tiles, kt, left, parts, SPLIT_K)
        col = 0
        if BIAS:
            _, _, pn = _place(t, own, npn, rank, GROUP, SPAN, TP)
            col = gl.where(hands_over, pn * s.BN, n)  # the sum of one part has the bias: there is none behind n
        acc, slot, phase = product(s, slot, phase, last - first, scale, bias, col, n, BIAS, TEAM)
        if SPLIT_K:
            slot_d, phase_d = finish_part(
                acc, s, slot_d, phase_d, t, unit, hands_over, tiles, left, parts, sums, summed, epoch, err, limit, rank,
                OP_AG,
            )  # fmt: skip
        else:
            slot_d, phase_d = hand_over_tile(acc, s, slot_d, phase_d, s.BN, TEAM)


@gluon.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit", "mp", "left", "parts"])
def hopper_ag_gemm_kernel(
    a, xd, b, c, x, kept, bias, xs, gs, ws, data_table, flags, ctrl, epochs, err, limit, slot, next_slot,
    flag_off, buf_off, n, k, mp, chunk_k, rank, left, parts, sums,
    TP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, KCH: gl.constexpr,
    WIDTH: gl.constexpr, SPAN: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr,
    KEEP: gl.constexpr, OWN: gl.constexpr, CTAS: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    BIAS: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr, TEAMS: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """See the module. ``mp`` must be at least ``BM`` and, with scales of "blocks", a multiple of four; ``chunk_k`` a
    multiple of ``BK``. Without ``BIAS`` no bias is read, without ``SCALES`` (None) no scales; of "blocks" ``xs``,
    ``gs`` and ``ws`` are descriptors, of "tensor" pointers. ``kept`` is read with OWN alone. SPLIT_K
    and what it needs are those of :mod:`megatron_flux.kernels.hopper.split_k`; without, left is 0 and parts 1.
    """
    epoch = gl.load(epochs + slot)
    summed = flags + flag_off - MOST_CTAS
    own = gl.cdiv(mp, BM)
    npn = gl.cdiv(n, BN)
    kt = gl.cdiv(k, BK)
    s = shared_memory(
        a, b, c, xs, ws, BM, BN, BK, STAGES, RING, TRANSPOSED, DTYPE, SCALES, PROMOTE, TEAMS
    )  # fmt: skip
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (_multiply, (s, own, npn, kt, bias, xs, ws, n, rank, left, parts, sums, summed, epoch, err, limit,
                             GROUP, TP, SPAN, CTAS, BIAS, SPLIT_K, 0)),
                (_load, (s, a, xd, b, xs, gs, ws, flags, flag_off, epoch, err, limit, own, npn, kt, chunk_k // BK, mp,
                         rank, left, parts, GROUP, KCH, TP, SPAN, EARLY, LATE, CTAS, SPLIT_K)),
                (_store, (s, c, own, npn, mp, rank, left, parts, GROUP, TP, SPAN, CTAS, SPLIT_K)),
                (_keep, (x, kept, data_table, buf_off, flags, flag_off, epoch, err, limit, own, mp, k, chunk_k, rank,
                         BM, KCH, TP, EARLY, LATE, WIDTH, KEEP, OWN, CTAS)),
            ],
            [1, 1, 2],
            [80, 80, 80],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (s, own, npn, kt, bias, xs, ws, n, rank, left, parts, sums, summed, epoch, err, limit,
                             GROUP, TP, SPAN, CTAS, BIAS, SPLIT_K, 0)),
                (_multiply, (s, own, npn, kt, bias, xs, ws, n, rank, left, parts, sums, summed, epoch, err, limit,
                             GROUP, TP, SPAN, CTAS, BIAS, SPLIT_K, 1)),
                (_load, (s, a, xd, b, xs, gs, ws, flags, flag_off, epoch, err, limit, own, npn, kt, chunk_k // BK, mp,
                         rank, left, parts, GROUP, KCH, TP, SPAN, EARLY, LATE, CTAS, SPLIT_K)),
                (_store, (s, c, own, npn, mp, rank, left, parts, GROUP, TP, SPAN, CTAS, SPLIT_K)),
                (_keep, (x, kept, data_table, buf_off, flags, flag_off, epoch, err, limit, own, mp, k, chunk_k, rank,
                         BM, KCH, TP, EARLY, LATE, WIDTH, KEEP, OWN, CTAS)),
            ],
            [4, 1, 1, 2],
            [224, 64, 64, 64],
        )  # fmt: skip
    leave(ctrl, epochs, epoch, next_slot, CTAS)
