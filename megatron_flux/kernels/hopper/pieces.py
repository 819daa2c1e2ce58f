"""Parts of the warp-specialised Hopper kernels, in Gluon: rings, matrix product, bounded waits, fences.

Contract
    There is one CTA per SM, with four kinds of warps:

    * *multiply* (8 warps, the default partition): runs wgmma on the operands from *load*, then puts the tile into
      shared memory. With two TEAMS, 4 of its warps are in the default partition and 4 in another, each with half the
      rows of a tile: one team multiplies while the other does arithmetic.
    * *load* (1 warp): loads both operands by TMA, up to ``STAGES`` blocks ahead, also across tiles. Only it waits for
      data of peers.
    * *store* (1 warp): stores finished tiles by TMA, ``PIECE`` columns at a time, each tile with its fence and flag.
    * *aux* (4 warps): does the operator's other work (copying, adding) in registers, beside the product.

    Rings in shared memory are ordered by mbarriers: ``full`` and ``empty`` for operands, ``ready`` and ``free`` for
    pieces of results. A phase is the parity of how often a slot was used.

Measured (4 x H200, 8192 x 12288 x 6144, GEMM + reduce-scatter: 1.60 ms GEMM alone, 2.15 serial)
    Plain Triton took 1.68 ms with stores to local memory, 1.81 with stores to peers, and 1.79 with the reduction. A
    64 KB store to a peer keeps the SM's TMA unit busy for microseconds, while the loads of the next tile queue behind
    it. Small pieces, one at a time, leave room for loads. A separate warp waits for them.

Hazards
    * One thread does ``mbarrier.arrive``, so a barrier of the partition must come before it.
    * The ``.read`` form of waiting for a store says that shared memory may be reused, not that the data has arrived.
    * If a variable begins as an alias of another, its changes are lost in a loop.
    * Triton 3.6 turns the constants of a named tuple variable into tensors. So kernels write out the list of warps
      for one team and for two.
    * TMA reads from multiples of 16 bytes in a row, and writes to multiples of 128 in shared memory. From other columns
      it stops with an illegal instruction (seen on an H200).
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megatron_flux.kernels.device import give_up, now

# Triton 3.9 has other names for these.
aggregate = getattr(gluon, "aggregate", None) or tl.core._aggregate
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

PIECE = gl.constexpr(64)  # columns of a piece: one 128-byte swizzle span of 16-bit elements
LINE = gl.constexpr(32)  # scales of a weight that come at once: the least that keeps the next ones where TMA can write
ALIGNED = gl.constexpr(4)  # of them, where TMA can begin to read

FENCE_SYSTEM = gl.constexpr("fence.acq_rel.sys;")  # of every thread
FENCE_PROXY = gl.constexpr("fence.proxy.async;")  # orders generic accesses (a polled flag) before TMA ones
STORES_DONE = gl.constexpr("cp.async.bulk.wait_group 0;")
"""Waits until this thread's TMA stores have arrived wherever they went."""
SLEEP = gl.constexpr("nanosleep.u32 $1;")  # nanoseconds, about so long, less often more; at most 1 ms


_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpreted(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory, seen in another way."""
    if _PUBLIC:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:  # noqa: RET505 - Gluon compiles one of the two
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def each_thread(ASM: gl.constexpr, number):
    """Run ``ASM``, whose operand is ``number`` (any int32 where it has none)."""
    return gl.inline_asm_elementwise(ASM + " mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(slot, phase, SLOTS: gl.constexpr):
    """The next slot of a ring, and its phase."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def _acquire(flags):
    """``ld.acquire.sys`` of each flag: a fence would also wait for this thread's own stores."""
    return gl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flags.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_flags(flags, COUNT: gl.constexpr, epoch, err, limit, OP: gl.constexpr, peer, unit, PAUSE: gl.constexpr):
    """Spin until ``COUNT`` flags have reached ``epoch``; see :func:`megatron_flux.kernels.device.wait_flags`. ``PAUSE``
    nanoseconds pass between polls.
    """
    per_thread: gl.constexpr = 1 if COUNT <= 32 else COUNT // 32
    layout: gl.constexpr = gl.BlockedLayout([per_thread], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, COUNT, layout=layout)
    behind = gl.min(_acquire(flags + lane) - epoch, axis=0)
    if behind < 0:
        start = now()
        while behind < 0:
            each_thread(SLEEP, PAUSE)
            ahead = _acquire(flags + lane) - epoch
            behind = gl.min(ahead, axis=0)
            if behind < 0:
                if now() - start > limit:
                    first = gl.min(gl.where(ahead < 0, lane, COUNT), axis=0)
                    give_up(err, OP, peer, first, unit, epoch, behind, False)


MEMORY = ("sa", "sb", "full", "empty", "ss", "sw", "pieces", "ready", "free")
CONSTANTS = ("BM", "BN", "BK", "STAGES", "RING", "TRANSPOSED", "DTYPE", "SCALES", "PROMOTE", "TEAMS")


@aggregate
class Shared:
    """A CTA's shared memory and what a launch has decided, for all kinds of warps: see :func:`shared_memory`."""

    __annotations__ = dict.fromkeys(MEMORY, gl.shared_memory_descriptor) | dict.fromkeys(CONSTANTS, gl.constexpr)

    @gluon.constexpr_function
    def __init__(self, *values: object) -> None:
        """By position: of MEMORY, then of CONSTANTS."""
        for name, value in zip((*MEMORY, *CONSTANTS), values, strict=True):
            setattr(self, name, value if name in MEMORY else gl.constexpr(value))


@gluon.jit
def rings(SLOTS: gl.constexpr, FILLING: gl.constexpr = 1, READING: gl.constexpr = 1):
    """Two mbarriers for each slot of a ring: filled, and free again, when so many partitions have said so."""
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(filled.index(i), count=FILLING)
        mbarrier.init(free.index(i), count=READING)
    return filled, free


@gluon.jit
def shared_memory(
    a, b, result, xs, ws, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    RING: gl.constexpr, TRANSPOSED: gl.constexpr, DTYPE: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr,
    TEAMS: gl.constexpr,
):  # fmt: skip
    """Rings of operands ``sa`` and ``sb`` and, with SCALES "blocks", of their scales ``ss`` and ``sw``, which *load*
    fills and *multiply* empties; and of ``pieces`` of results, ``ready`` for *store* and then ``free``.
    """
    sa = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    sb = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005 - Gluon
    pieces = gl.allocate_shared_memory(DTYPE, [RING, BM, PIECE], result.layout)
    ss = sa
    sw = sa
    if SCALES == "blocks":
        ss = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], xs.layout)
        sw = gl.allocate_shared_memory(gl.float32, [STAGES] + ws.block_type.shape, ws.layout)  # noqa: RUF005 - Gluon
    full, empty = rings(STAGES, 1, TEAMS)
    ready, free = rings(RING, TEAMS, 1)
    return Shared(
        sa, sb, full, empty, ss, sw, pieces, ready, free, BM, BN, BK, STAGES, RING, TRANSPOSED, DTYPE, SCALES, PROMOTE,
        TEAMS,
    )  # fmt: skip


@gluon.jit
def load_blocks(s, a, b, row, col, first, last, xs, xs_row, xs_col, ws, slot, phase):
    """Load k blocks ``first`` to ``last`` of both operands as slots become empty; the ring's next slot and phase. With
    SCALES "blocks" also BM scales of x into ``ss``: row ``xs_row`` of ``xs`` for k block 0, from column ``xs_col``; and
    those of the weight into ``sw``: for each 128 columns as many as fill a line, from the last aligned block on.
    """
    for ki in range(first, last):
        mbarrier.wait(s.empty.index(slot), phase)
        loaded, to_a, to_b = s.full.index(slot), s.sa.index(slot), s.sb.index(slot)
        scales: gl.constexpr = 4 * (s.BM + LINE) if s.SCALES == "blocks" else 0
        mbarrier.expect(loaded, (s.BM + s.BN) * s.BK * (s.sa.dtype.primitive_bitwidth // 8) + scales)
        if s.SCALES == "blocks":
            copy_in(xs, [xs_row + ki, xs_col], loaded, s.ss.index(slot))
            copy_in(ws, [col // 128, ki // ALIGNED * ALIGNED], loaded, s.sw.index(slot))
        copy_in(a, [row, ki * s.BK], loaded, to_a)
        if s.TRANSPOSED:
            copy_in(b, [ki * s.BK, col], loaded, to_b)
        else:
            copy_in(b, [col, ki * s.BK], loaded, to_b)
        slot, phase = advance(slot, phase, s.STAGES)
    return slot, phase


@gluon.jit
def slot_before(slot, STAGES: gl.constexpr):
    """The slot before; not a variable carried through the loop, because one that begins as an alias is not carried."""
    return gl.where(slot == 0, STAGES - 1, slot - 1)


@gluon.constexpr_function
def tile_layout(bn, deep, teams):
    """Of a team's part of a tile, with ``deep`` numbers along k in an instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8 // teams, 1], instr_shape=[16, bn, deep])


@gluon.jit
def team_rows(s, tile, TEAM: gl.constexpr):
    """The team's rows of a tile in shared memory."""
    if s.TEAMS == 1:
        return tile
    else:  # noqa: RET505 - Gluon compiles one of the two
        return tile.slice(TEAM * (s.BM // s.TEAMS), s.BM // s.TEAMS)


@gluon.jit
def multiply_tile(s, slot, phase, kt, bias, col, n, BIAS: gl.constexpr, TEAM: gl.constexpr):
    """One tile's product over ``kt`` k blocks, of the team's rows; returns it with the ring's next slot and phase. With
    ``BIAS`` the sum begins with ``bias[col:col+BN]``, which then needs no registers of its own.
    """
    mma: gl.constexpr = tile_layout(s.BN, 256 // s.sa.dtype.primitive_bitwidth, s.TEAMS)
    acc = gl.zeros((s.BM // s.TEAMS, s.BN), gl.float32, layout=mma)
    if BIAS:
        cols = col + gl.arange(0, s.BN, layout=gl.SliceLayout(0, mma))
        acc += gl.expand_dims(gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32), 0)
    for ki in range(kt):
        mbarrier.wait(s.full.index(slot), phase)
        x = team_rows(s, s.sa.index(slot), TEAM)
        if s.TRANSPOSED:
            y = s.sb.index(slot)
        else:
            y = s.sb.index(slot).permute((1, 0))
        acc = warpgroup_mma(x, y, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        barrier()
        mbarrier.arrive(s.empty.index(slot_before(slot, s.STAGES)), count=1, pred=ki > 0)
        slot, phase = advance(slot, phase, s.STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    barrier()
    mbarrier.arrive(s.empty.index(slot_before(slot, s.STAGES)), count=1)
    return acc, slot, phase


@gluon.jit
def hand_over_tile(acc, s, slot, phase, BN: gl.constexpr, TEAM: gl.constexpr):
    """Give the team's rows of ``BN`` finished columns to *store*, in pieces of ``PIECE`` columns, left to right."""
    if BN == PIECE:
        mbarrier.wait(s.free.index(slot), phase ^ 1)
        team_rows(s, s.pieces.index(slot), TEAM).store(acc.to(s.DTYPE))
        fence_async_shared()
        barrier()
        mbarrier.arrive(s.ready.index(slot), count=1)
        slot, phase = advance(slot, phase, s.RING)
    else:
        left, right = gl.split(gl.permute(gl.reshape(acc, (s.BM // s.TEAMS, 2, BN // 2)), (0, 2, 1)))
        slot, phase = hand_over_tile(left, s, slot, phase, BN // 2, TEAM)
        slot, phase = hand_over_tile(right, s, slot, phase, BN // 2, TEAM)
    return slot, phase
