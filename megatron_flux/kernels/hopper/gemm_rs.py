"""GEMM + reduce-scatter and all-reduce, warp-specialised for Hopper: ``out[local rows] = sum over ranks of x_r @ w_r``.

With STEPS = TP a tile has one destination, the rank that owns its rows. With STEPS = 1 it goes to all ranks, each of
which adds all partials: an all-reduce in one shot, ``out = sum over ranks of x_r @ w_r`` with ``mp = m``.

Shapes, order of tiles, flags and guarantees are those of :mod:`megatron_flux.kernels.plain`. The kinds of warps
(*multiply*, *load*, *store*, *aux*) are those of :mod:`megatron_flux.kernels.hopper.pieces`. This module says what
differs.

Schedule
    * The first ``workers`` CTAs multiply, by default all. On each of them *aux* adds partials while tensor cores
      multiply, and *multiply* helps once it has no more tiles. If there are fewer workers than CTAS, because the last
      round of tiles leaves SMs idle anyway, the other CTAs only add, with all their warps, and *aux* of workers rests.
    * *store* sends a tile in pieces of 16 KB. It starts a piece when the one before has left shared memory. It spreads
      the pieces of a tile over ``spread`` nanoseconds, with a different offset in every CTA. A CTA's last tile and this
      rank's own tiles are sent without pauses.
    * A tile's flag is written as soon as the tile has arrived.
    * A worker's *share* is every tile in ``workers``. BESIDE other process groups, a worker marks its share as taken
      when it starts. Shares that are still free when it has finished belong to CTAs that have not started, because
      another group's kernel holds their SMs. *load* takes these too, the lowest first, and tells the other warps. CTAs
      start in the order of their numbers, so all tiles are sent, however few CTAs run. This costs 0 to 0.5 % in bf16,
      and 1 to 2 % in FP8 with blocks (2 x H100). Numbers from a counter, in the order in which CTAs start, cost 1 to
      6 %.
    * With SPLIT_K the tiles of the last round are divided along k: :mod:`megatron_flux.kernels.hopper.split_k`.

Measured (4 x H200, m=1024, n=12288, k=3072)
    Without ``spread``, CTAs that finish together fill the link. Loads of operands then queue behind pieces that the
    link does not accept yet, and the next tile took 48 us instead of 32. With ``spread`` it took 31 us.

Measured (1 x H200 for a rank of TP 4, FC2 of Llama-70B, sustained; results/fp8-scatter)
    Promoted FP8 took 0.834 ms with partials added on every SM, and 0.797 with 128 workers of 132 SMs; bf16 took 1.486
    and 1.445. If products are short, four SMs add too slowly: FP8 of k = 2048 took 0.531 ms instead of 0.499. Fewer
    instructions for adding on every SM, or more warps, gained nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megatron_flux.kernels.device import MOST_CTAS, OP_AR, OP_RS, leave, now, publish, scatter_place, take
from megatron_flux.kernels.hopper.pieces import (
    FENCE_SYSTEM,
    PIECE,
    SLEEP,
    STORES_DONE,
    advance,
    aggregate,
    barrier,
    copy_out,
    each_thread,
    hand_over_tile,
    load_blocks,
    rings,
    shared_memory,
    wait_flags,
)
from megatron_flux.kernels.hopper.scaled import product
from megatron_flux.kernels.hopper.split_k import finish_part, part_of


@aggregate
class Shares:
    """A CTA's shares of the tiles: the first one, and the next on its way from *load* to the other warps."""

    __annotations__ = {"first": gl.tensor} | dict.fromkeys(("number", "told", "heard"), gl.shared_memory_descriptor)

    @gluon.constexpr_function
    def __init__(self, first: object, number: object, told: object, heard: object) -> None:
        """``number`` ``[32]``, every one the same; ``told`` and ``heard`` are a ring of mbarriers with one slot."""
        self.first, self.number, self.told, self.heard = first, number, told, heard


@gluon.jit
def _shares(taken, epoch, workers, TEAMS: gl.constexpr, BESIDE: gl.constexpr):
    number = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told, heard = rings(1, 1, TEAMS + 1)
    first = gl.program_id(0)
    if BESIDE:
        if first < workers:
            first = gl.where(take(taken, first, epoch), first, workers)
    return Shares(first, number, told, heard)


@gluon.jit
def _left(taken, epoch, workers, above):
    """Take the first share above ``above`` that its own CTA has not; workers if there is none."""
    layout: gl.constexpr = gl.BlockedLayout([MOST_CTAS // 32], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, MOST_CTAS, layout=layout)
    share = workers
    first = workers - 1
    while (share == workers) & (first < workers):
        seen = gl.load(taken + lane, mask=lane < workers, other=epoch, cache_modifier=".cg")
        first = gl.min(gl.where((seen != epoch) & (lane > above), lane, workers), axis=0)
        if first < workers:
            if take(taken, first, epoch):
                share = first
    return share


@gluon.jit
def _tell(shares, share, phase):
    mbarrier.wait(shares.heard.index(0), phase ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    shares.number.store(gl.full((32,), 0, gl.int32, layout=layout) + share)
    barrier()
    mbarrier.arrive(shares.told.index(0), count=1)
    return phase ^ 1


@gluon.jit
def _hear(shares, phase):
    mbarrier.wait(shares.told.index(0), phase)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    share = gl.max(shares.number.load(layout), axis=0)
    barrier()
    mbarrier.arrive(shares.heard.index(0), count=1)
    return share, phase ^ 1


@gluon.jit
def _load(
    s, shares, a, b, xs, ws, taken, epoch, nrb, npn, kt, mp, rank, workers, left, parts,
    BAND: gl.constexpr, STEPS: gl.constexpr, BESIDE: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 1
    said = 0
    share = shares.first
    tiles = nrb * npn * STEPS
    while share < workers:
        for unit in range(share, tiles + left * (parts - 1), workers):
            t, first, last, _ = part_of(unit, tiles, kt, left, parts, SPLIT_K)
            step, rb, pn = scatter_place(t, nrb, npn, BAND, STEPS)
            row = ((rank + 1 + step) % STEPS) * mp + rb * s.BM
            slot, phase = load_blocks(s, a, b, row, pn * s.BN, first, last, xs, 0, row, ws, slot, phase)
        if BESIDE:
            share = _left(taken, epoch, workers, share)
            said = _tell(shares, share, said)
        else:
            share = share * 0 + workers


@gluon.jit
def _store(
    s, shares, d0, d1, d2, d3, d4, d5, d6, d7, flag_table, flag_off, row_off, nrb, npn, rank, epoch, spread,
    workers, left, parts, BAND: gl.constexpr, TP: gl.constexpr, STEPS: gl.constexpr, BESIDE: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    sinks = (d0, d1, d2, d3, d4, d5, d6, d7)
    slot = 0
    phase = 0
    tiles = nrb * npn
    step_ns = spread // (s.BN // PIECE)
    offset = step_ns * (gl.program_id(0) % 32) // 32
    heard = 0
    share = shares.first
    units = tiles * STEPS + left * (parts - 1)
    while share < workers:
        for unit in range(share, units, workers):
            t, _, _, hands_over = part_of(unit, tiles * STEPS, tiles, left, parts, SPLIT_K)
            if hands_over:
                step, rb, pn = scatter_place(t, nrb, npn, BAND, STEPS)
                tile = rb * npn + pn
                row = row_off + (rank * tiles + tile) * s.BM
                owner = gl.load(flag_table + (rank + 1 + step) % TP)
                start = now()
                for piece in gl.static_range(s.BN // PIECE):
                    mbarrier.wait(s.ready.index(slot), phase)
                    if step_ns > 0:
                        if piece == 0:
                            start = now() + offset
                        if ((STEPS == 1) | (step != STEPS - 1)) & (unit + workers < units):
                            gap = gl.where(unit + workers < tiles * STEPS - left, step_ns, step_ns // parts)
                            while now() - start < piece * gap:
                                each_thread(SLEEP, 200)
                    source = s.pieces.index(slot)
                    for to in gl.static_range(TP):
                        if STEPS == 1:
                            copy_out(sinks[to], [row, piece * PIECE], source)
                        elif step == to:
                            copy_out(sinks[to], [row, piece * PIECE], source)
                    tma.store_wait(0)
                    mbarrier.arrive(s.free.index(slot), count=1)
                    slot, phase = advance(slot, phase, s.RING)
                each_thread(STORES_DONE, epoch)
                barrier()
                each_thread(FENCE_SYSTEM, epoch)
                publish(owner, flag_off + tile * TP + rank, epoch, "relaxed")
                if STEPS == 1:
                    for to in gl.static_range(1, TP):
                        peer = gl.load(flag_table + (rank + 1 + to) % TP)
                        publish(peer, flag_off + tile * TP + rank, epoch, "relaxed")
        if BESIDE:
            share, heard = _hear(shares, heard)
        else:
            share = share * 0 + workers


@gluon.jit
def _reduce(
    flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, mp, n,
    BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr, TP: gl.constexpr, STEPS: gl.constexpr,
    PIECES: gl.constexpr, CHUNK: gl.constexpr, PAUSE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [warps], [0])
    tiles = nrb * npn
    ticket = gl.atomic_add(ctrl, 1, sem="relaxed", scope="gpu")
    while ticket < tiles * PIECES:
        tile = ticket // PIECES
        if STEPS == 1:  # in the order in which tiles are multiplied
            _, rb, pn = scatter_place(tile, nrb, npn, BAND, STEPS)
            tile = rb * npn + pn
        piece = ticket % PIECES
        OP: gl.constexpr = OP_AR if STEPS == 1 else OP_RS
        wait_flags(flags + flag_off + tile * TP, TP, epoch, err, limit, OP, -1, tile, PAUSE)
        following = gl.atomic_add(ctrl, 1, sem="relaxed", scope="gpu")
        row0 = (tile // npn) * BM
        col0 = (tile % npn) * BN
        for part in range(BM * BN // (CHUNK * PIECES)):
            e = (piece * (BM * BN // (CHUNK * PIECES)) + part) * CHUNK + gl.arange(0, CHUNK, layout=layout)
            total = gl.zeros((CHUNK,), gl.float32, layout=layout)
            for src in gl.static_range(TP):
                from_src = recv + (row_off + (src * tiles + tile) * BM).to(gl.int64) * BN
                total += gl.load(from_src + e, cache_modifier=".cg").to(gl.float32)
            r = row0 + e // BN
            c = col0 + e % BN
            gl.store(out + r.to(gl.int64) * n + c, total.to(DTYPE), mask=(r < mp) & (c < n))
        ticket = following


@gluon.jit
def _add_beside(
    flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, mp, n,
    BM: gl.constexpr, BN: gl.constexpr, BAND: gl.constexpr, TP: gl.constexpr, STEPS: gl.constexpr,
    PIECES: gl.constexpr, DTYPE: gl.constexpr, first,
):  # fmt: skip
    if gl.program_id(0) >= first:
        _reduce(
            flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, mp, n, BM, BN, BAND, TP, STEPS,
            PIECES, 2048 if STEPS == 1 else 1024, 500, DTYPE,
        )  # fmt: skip


@gluon.jit
def _plus(acc, addend, first, row, col, mp, n):
    """``acc`` plus its part of ``addend`` ``[m, n]``: from ``row`` of the ``mp`` rows that begin at ``first``."""
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, acc.type.shape[0], layout=gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, acc.type.shape[1], layout=gl.SliceLayout(0, layout))
    at = gl.expand_dims((first + rows).to(gl.int64) * n, 1) + gl.expand_dims(cols, 0)
    inside = gl.expand_dims(rows < mp, 1) & gl.expand_dims(cols < n, 0)
    return acc + gl.load(addend + at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def _multiply(
    s, shares, xs, ws, addend, flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, kt, mp, n, rank,
    workers, left, parts, sums, BAND: gl.constexpr, TP: gl.constexpr, STEPS: gl.constexpr, BESIDE: gl.constexpr,
    PIECES: gl.constexpr, ADDEND: gl.constexpr, SPLIT_K: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 0
    slot_d = 0
    phase_d = 0
    scale = 0.0
    if s.SCALES == "tensor":
        scale = gl.load(xs) * gl.load(ws)
    heard = 0
    share = shares.first
    tiles = nrb * npn * STEPS
    while share < workers:
        for unit in range(share, tiles + left * (parts - 1), workers):
            t, first_k, last_k, hands_over = part_of(unit, tiles, kt, left, parts, SPLIT_K)
            acc, slot, phase = product(s, slot, phase, last_k - first_k, scale, None, 0, n, False, TEAM)
            if ADDEND:
                if hands_over:
                    step, rb, pn = scatter_place(t, nrb, npn, BAND, STEPS)
                    first = ((rank + 1 + step) % STEPS) * mp
                    acc = _plus(acc, addend, first, rb * s.BM + TEAM * (s.BM // s.TEAMS), pn * s.BN, mp, n)
            if SPLIT_K:
                OP: gl.constexpr = OP_AR if STEPS == 1 else OP_RS
                slot_d, phase_d = finish_part(
                    acc, s, slot_d, phase_d, t, unit, hands_over, tiles, left, parts, sums,
                    flags + flag_off - MOST_CTAS, epoch, err, limit, rank, OP,
                )  # fmt: skip
            else:
                slot_d, phase_d = hand_over_tile(acc, s, slot_d, phase_d, s.BN, TEAM)
        if BESIDE:
            share, heard = _hear(shares, heard)
        else:
            share = share * 0 + workers
    _reduce(
        flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, mp, n, s.BM, s.BN, BAND, TP, STEPS,
        PIECES, 4096, 50, s.DTYPE,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit", "spread", "workers", "mp", "left", "parts"]
)
def hopper_gemm_rs_kernel(
    a, b, d0, d1, d2, d3, d4, d5, d6, d7, xs, ws, addend, flag_table, flags, recv, out, ctrl, epochs, err, limit,
    slot, next_slot, flag_off, row_off, n, kt, mp, rank, spread, workers, left, parts, sums,
    TP: gl.constexpr, STEPS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BAND: gl.constexpr,
    CTAS: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr, PIECES: gl.constexpr, TRANSPOSED: gl.constexpr,
    DTYPE: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr, TEAMS: gl.constexpr, DEDICATED: gl.constexpr,
    ADDEND: gl.constexpr, BESIDE: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """See the module. ``d0`` … ``d7`` are the workspaces of the destinations by step, as pieces (None beyond TP).
    DEDICATED: ``workers`` CTAS multiply, else all; its number is no constant, since it follows from ``mp``.
    With ADDEND ``addend`` ``[m, n]`` is added to this rank's product before it is rounded. SPLIT_K and what
    it needs are those of :mod:`megatron_flux.kernels.hopper.split_k`; without, left is 0 and parts 1.
    Without ``SCALES`` (None) no scales are read; of "blocks" ``xs`` and ``ws`` are descriptors, of "tensor" pointers.
    """
    epoch = gl.load(epochs + slot)
    nrb = gl.cdiv(mp, BM)
    npn = gl.cdiv(n, BN)
    s = shared_memory(
        a, b, d0, xs, ws, BM, BN, BK, STAGES, RING, TRANSPOSED, DTYPE, SCALES, PROMOTE, TEAMS
    )  # fmt: skip
    shares = _shares(ctrl + 2, epoch, workers if DEDICATED else CTAS, TEAMS, BESIDE)
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (_multiply, (s, shares, xs, ws, addend, flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off,
                             nrb, npn, kt, mp, n, rank, workers if DEDICATED else CTAS, left, parts, sums, BAND,
                             TP, STEPS, BESIDE, PIECES, ADDEND, SPLIT_K, 0)),
                (_load, (s, shares, a, b, xs, ws, ctrl + 2, epoch, nrb, npn, kt, mp, rank,
                         workers if DEDICATED else CTAS, left, parts, BAND, STEPS, BESIDE, SPLIT_K)),
                (_store, (s, shares, d0, d1, d2, d3, d4, d5, d6, d7, flag_table, flag_off, row_off, nrb, npn, rank,
                          epoch, spread, workers if DEDICATED else CTAS, left, parts, BAND, TP, STEPS, BESIDE,
                          SPLIT_K)),
                (_add_beside, (flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, mp, n,
                               BM, BN, BAND, TP, STEPS, PIECES, DTYPE, workers % CTAS if DEDICATED else 0)),
            ],
            [1, 1, 2],
            [80, 80, 80],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (s, shares, xs, ws, addend, flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off,
                             nrb, npn, kt, mp, n, rank, workers if DEDICATED else CTAS, left, parts, sums, BAND,
                             TP, STEPS, BESIDE, PIECES, ADDEND, SPLIT_K, 0)),
                (_multiply, (s, shares, xs, ws, addend, flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off,
                             nrb, npn, kt, mp, n, rank, workers if DEDICATED else CTAS, left, parts, sums, BAND,
                             TP, STEPS, BESIDE, PIECES, ADDEND, SPLIT_K, 1)),
                (_load, (s, shares, a, b, xs, ws, ctrl + 2, epoch, nrb, npn, kt, mp, rank,
                         workers if DEDICATED else CTAS, left, parts, BAND, STEPS, BESIDE, SPLIT_K)),
                (_store, (s, shares, d0, d1, d2, d3, d4, d5, d6, d7, flag_table, flag_off, row_off, nrb, npn, rank,
                          epoch, spread, workers if DEDICATED else CTAS, left, parts, BAND, TP, STEPS, BESIDE,
                          SPLIT_K)),
                (_add_beside, (flags, flag_off, recv, out, ctrl, epoch, err, limit, row_off, nrb, npn, mp, n,
                               BM, BN, BAND, TP, STEPS, PIECES, DTYPE, workers % CTAS if DEDICATED else 0)),
            ],
            [4, 1, 1, 2],
            [216, 80, 80, 80],
        )  # fmt: skip
    leave(ctrl, epochs, epoch, next_slot, CTAS)
