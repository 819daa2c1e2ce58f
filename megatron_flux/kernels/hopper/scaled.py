"""Products of FP8 operands for the Hopper kernels: with fast accumulation, or promoted to fp32 every 128 of k.

Contract
    :func:`scaled_tile` is :func:`megatron_flux.kernels.hopper.pieces.multiply_tile` for FP8: same rings, same return.
    Both operands are k-major, ``[rows, k]``, which is all that FP8 ``wgmma`` takes; formats may differ.

    =============  ==================================================================================================
    SCALES         the product is
    =============  ==================================================================================================
    ``"tensor"``   ``(x @ w) * (xs[0] * ws[0])``
    ``"blocks"``   the sum over blocks of 128 of k of ``(x @ w) * xs[block, row] * ws[column // 128, block]``
    =============  ==================================================================================================

    A bias is added to the rounded product, never in one operation with it: so cuBLASLt does, whose results with one
    scale per tensor these are to the bit (results/fp8-gemm-h200, orders.jsonl).

    PROMOTE, always on with them: the tensor core adds up 128 products in its own precision (14 bits on Hopper), which
    are then added to a sum in fp32; that is what cuBLASLt does without fast accumulation. BK is 128 then, and BN 128 or
    256.

Schedule with PROMOTE
    A team multiplies a k block by 128 columns, waits for it, and adds it: meanwhile the other team multiplies. Beside
    the sum a thread holds the product of a block. A team that adds leaves the tensor cores to one other, so nothing
    else may lie between two of its products: it waits for the next block and frees the one before while a product is
    under way, and scales are loaded once. That took 5 to 7 % off (results/fp8-gemm-h100, `schedule.jsonl`).

    Hazards
        * Of the barriers that Triton puts between an arrival and what follows it in shared memory, those beside a
          product cost nothing: hence the two explicit ones. Before a product they cost what they take.
        * Compilers put sums off past a branch, and a wait is one. Sums that are put off past the next product need
          registers beside it: 1 KB a thread was spilled. :func:`_here` forbids it.

    Measured, not taken (results/fp8-gemm-h200): teams that take turns, 2 to 10 % slower by mbarriers and no faster by
    named ones; pieces of 64 columns, one multiplied while another is added, which gain 2 % where blocks are gathered,
    nothing with one scale, and lose 1 to 5 % where results are scattered.

    Scales come with the operands of their block, by *load*: a block takes less time than a load from L2, so what each
    thread loads itself one block ahead comes too late (run so on an H200).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from megatron_flux.kernels.hopper.pieces import (
    ALIGNED,
    LINE,
    advance,
    barrier,
    multiply_tile,
    reinterpreted,
    slot_before,
    team_rows,
    tile_layout,
)

HALF = gl.constexpr(128)  # columns that share the scales of a weight


@gluon.jit
def _rounded_product(a, b):
    """Compilers make one operation of a product and the sum behind it, but for one that says how it is rounded."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _scale(scales, at):
    """Number ``at`` in shared memory, for every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(scales.index(at).load(layout), axis=0)


@gluon.jit
def _here(sum):
    """``sum``, which compilers may not put off: past the product behind it, whose registers are those it is made of."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sum], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _begun(x, y, nothing):
    """The product of x and half a tile's weight, under way."""
    return warpgroup_mma(x, y.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _added(acc, part, by_row, by_half, SCALES: gl.constexpr):
    """``acc`` and the scaled product that :func:`_begun` began."""
    part = warpgroup_mma_wait(0, deps=(part,))
    if SCALES == "blocks":
        return acc + part * gl.expand_dims(by_row * by_half, 1)
    else:  # noqa: RET505 - Gluon compiles one of the two
        return acc + part


@gluon.jit
def _promoted(
    sa, sb, full, empty, slot, phase, kt, ss, sw, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    SCALES: gl.constexpr, TEAM: gl.constexpr, TEAMS: gl.constexpr,
):  # fmt: skip
    """The halves of a tile, of 128 columns each; of a tile that is one half, the second is zero."""
    mma: gl.constexpr = tile_layout(HALF, 32, TEAMS)
    nothing = gl.zeros((BM // TEAMS, HALF), gl.float32, layout=mma)
    first = nothing
    second = nothing
    numbers = sa
    if SCALES == "blocks":
        numbers = reinterpreted(sw, gl.float32, [STAGES * LINE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.wait(full.index(slot), phase)
    for block in range(kt):
        by_row = 0.0
        by_first = 0.0
        by_second = 0.0
        if SCALES == "blocks":
            by_row = team_rows(ss.index(slot).reshape((BM,)), BM, TEAM, TEAMS).load(gl.SliceLayout(1, mma))
            at = slot * LINE + block % ALIGNED
            by_first = _scale(numbers, at)
            if BN > HALF:
                by_second = _scale(numbers, at + LINE // 2)
        x = team_rows(sa.index(slot), BM, TEAM, TEAMS)
        part = _begun(x, sb.index(slot).slice(0, HALF), nothing)
        barrier()
        mbarrier.arrive(empty.index(slot_before(slot, STAGES)), count=1, pred=block > 0)
        barrier()
        following, phase = advance(slot, phase, STAGES)
        if BN > HALF:
            first = _here(_added(first, part, by_row, by_first, SCALES))
            part = _begun(x, sb.index(slot).slice(HALF, HALF), nothing)
        mbarrier.wait(full.index(following), phase, pred=block + 1 < kt)
        if BN > HALF:
            second = _added(second, part, by_row, by_second, SCALES)
        else:
            first = _added(first, part, by_row, by_first, SCALES)
        slot = following
    barrier()
    mbarrier.arrive(empty.index(slot_before(slot, STAGES)), count=1)
    return first, second, slot, phase


@gluon.jit
def scaled_tile(
    sa, sb, full, empty, slot, phase, kt, scale, ss, sw, bias, col, n, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr, TEAM: gl.constexpr,
    TEAMS: gl.constexpr,
):  # fmt: skip
    """See the module. ``ss`` and ``sw``: where *load* brings the scales of x and of the weight, of blocks."""
    mma: gl.constexpr = tile_layout(BN, 32, TEAMS)
    if PROMOTE:
        acc, second, slot, phase = _promoted(
            sa, sb, full, empty, slot, phase, kt, ss, sw, BM, BN, STAGES, SCALES, TEAM, TEAMS
        )
        if BN > HALF:
            both = gl.permute(gl.join(acc, second), (0, 2, 1))
            acc = gl.convert_layout(gl.reshape(both, (BM // TEAMS, BN)), mma)
    else:
        acc, slot, phase = multiply_tile(
            sa, sb, full, empty, slot, phase, kt, None, 0, n, BM, BN, STAGES, False, False, TEAM, TEAMS
        )
    if SCALES == "tensor":
        acc = _rounded_product(acc, scale)
    if BIAS:
        cols = col + gl.arange(0, BN, layout=gl.SliceLayout(0, mma))
        acc += gl.expand_dims(gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32), 0)
    return acc, slot, phase
