"""Products of FP8 operands for the Hopper kernels: with fast accumulation, or promoted to fp32 every 128 of k.

Contract
    :func:`scaled_tile` is :func:`megatron_flux.kernels.hopper.pieces.multiply_tile` for FP8: same rings, same return.
    Both operands are k-major, ``[rows, k]``, which is all that FP8 ``wgmma`` takes; formats may differ.

    =============  ==================================================================================================
    SCALES         the product is
    =============  ==================================================================================================
    ``"tensor"``   ``(x @ w) * xs[0] * ws[0]``
    ``"blocks"``   the sum over blocks of 128 of k of ``(x @ w) * xs[block * ld + row] * ws[block]``; BK and BN are 128
    =============  ==================================================================================================

    PROMOTE, always on with blocks: the tensor core adds up 128 products in its own precision (14 bits on Hopper), which
    are then added to a sum in fp32; that is what cuBLASLt does without fast accumulation.

Schedule with PROMOTE
    A team multiplies a k block, waits for it, and adds it: meanwhile the other team multiplies. Beside the sum a thread
    holds the product of a block, which is why tiles are 128 x 128. Software pipelining within one team of eight warps
    needs a third tile of registers: ptxas spills, or makes the products wait for each other (triton 3.9).

    Scales are loaded one block ahead, behind the first operands of the tile: what those are loaded behind says that
    x's scales have arrived, too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from megatron_flux.kernels.hopper.pieces import advance, barrier, multiply_tile, team_rows, tile_layout


@gluon.jit
def _scales(xs, ws, rows, there):
    """Products of both operands' scales by row of a k block, where they are."""
    by_row = gl.load(xs + rows, mask=there, other=0.0, cache_modifier=".cg")
    return by_row * gl.load(ws)


@gluon.jit
def _promoted(
    sa, sb, full, empty, slot, phase, kt, xs, ld, left, ws, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    SCALES: gl.constexpr, MMA: gl.constexpr, TEAM: gl.constexpr, TEAMS: gl.constexpr,
):  # fmt: skip
    acc = gl.zeros((BM // TEAMS, BN), gl.float32, layout=MMA)
    nothing = gl.zeros((BM // TEAMS, BN), gl.float32, layout=MMA)
    if SCALES == "blocks":
        rows = TEAM * (BM // TEAMS) + gl.arange(0, BM // TEAMS, layout=gl.SliceLayout(1, MMA))
        mbarrier.wait(full.index(slot), phase)
        scales = _scales(xs, ws, rows, rows < left)
    for block in range(kt):
        if SCALES == "blocks":
            ahead = (block + 1 < kt).to(gl.int32)
            xs += ahead * ld
            ws += ahead
            following = _scales(xs, ws, rows, rows < left)
        mbarrier.wait(full.index(slot), phase)
        x = team_rows(sa.index(slot), BM, TEAM, TEAMS)
        part = warpgroup_mma(x, sb.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        if SCALES == "blocks":
            acc += part * gl.expand_dims(scales, 1)
            scales = following
        else:
            acc += part
        slot, phase = advance(slot, phase, STAGES)
    return acc, slot, phase


@gluon.jit
def scaled_tile(
    sa, sb, full, empty, slot, phase, kt, xs, ld, left, ws, bias, col, n, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SCALES: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr, TEAM: gl.constexpr,
    TEAMS: gl.constexpr,
):  # fmt: skip
    """See the module. Of the rows of x's scales at ``xs`` there are ``left``."""
    mma: gl.constexpr = tile_layout(BN, 32, TEAMS)
    if PROMOTE:
        acc, slot, phase = _promoted(
            sa, sb, full, empty, slot, phase, kt, xs, ld, left, ws, BM, BN, STAGES, SCALES, mma, TEAM, TEAMS
        )
    else:
        acc, slot, phase = multiply_tile(
            sa, sb, full, empty, slot, phase, kt, None, 0, n, BM, BN, STAGES, False, False, TEAM, TEAMS
        )
    if SCALES == "tensor":
        acc = acc * (gl.load(xs) * gl.load(ws))
    if BIAS:
        cols = col + gl.arange(0, BN, layout=gl.SliceLayout(0, mma))
        acc += gl.expand_dims(gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32), 0)
    return acc, slot, phase
