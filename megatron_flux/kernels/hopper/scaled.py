"""A tile's product for the Hopper kernels: of 16-bit operands, or of FP8 with fast accumulation or promoted sums.

Contract
    :func:`product` is :func:`megatron_flux.kernels.hopper.pieces.multiply_tile` with scales. Rings and results are the
    same. FP8 operands are k-major, ``[rows, k]``: FP8 ``wgmma`` takes nothing else. The operands' formats may differ.

    =============  ==================================================================================================
    SCALES         the product is
    =============  ==================================================================================================
    None           ``x @ w``
    ``"tensor"``   ``(x @ w) * (xs[0] * ws[0])``
    ``"blocks"``   the sum over blocks of 128 of k of ``(x @ w) * xs[block, row] * ws[column // 128, block]``
    =============  ==================================================================================================

    A bias is added to the rounded product, as in cuBLASLt. With one scale, results are bit-equal to cuBLASLt's
    (results/fp8-gemm-h200, orders.jsonl). A compiler fuses a product with the sum that follows it, unless the product
    names its rounding. In 16 bits the sum starts from the bias.

    PROMOTE, always on with "blocks": the tensor core adds up 128 products in its own precision (14 bits on Hopper).
    These sums are then added in fp32. cuBLASLt does the same without fast accumulation. BK is then 128, and BN 128 or
    256.

Schedule with PROMOTE
    A team multiplies a k block by 128 columns, waits, and adds; meanwhile the other team multiplies. Nothing else
    comes between two products of a team. It waits for the next block, and frees the previous one, during a product.
    Scales per tensor are read once. All that saved 2 to 6 % (results/fp8-gemm-h100, which says what else was tried).
    *load* brings the scales of blocks with the operands, because a block takes less time than a load from L2.

Hazards
    * Triton puts a barrier between an arrival and the next access to shared memory. So barriers are explicit, and come
      early.
    * Compilers move a sum behind a branch, such as a wait, unless assembly uses the sum before. Behind the next
      product the sum needs registers of its own: 1 KB per thread was spilled.
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
def _scale(scales, at):
    """Number ``at`` in shared memory, for every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(scales.index(at).load(layout), axis=0)


@gluon.jit
def _added(acc, part, by_row, by_half, SCALES: gl.constexpr):
    """``acc`` and the scaled product ``part``, which is under way."""
    part = warpgroup_mma_wait(0, deps=(part,))
    if SCALES == "blocks":
        return acc + part * gl.expand_dims(by_row * by_half, 1)
    else:  # noqa: RET505 - Gluon compiles one of the two
        return acc + part


@gluon.jit
def _promoted(s, slot, phase, kt, TEAM: gl.constexpr):
    """The halves of a tile, of 128 columns each; of a tile that is one half, the second is zero."""
    mma: gl.constexpr = tile_layout(HALF, 32, s.TEAMS)
    nothing = gl.zeros((s.BM // s.TEAMS, HALF), gl.float32, layout=mma)
    first = nothing
    second = nothing
    numbers = s.sa
    if s.SCALES == "blocks":
        numbers = reinterpreted(s.sw, gl.float32, [s.STAGES * LINE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.wait(s.full.index(slot), phase)
    for block in range(kt):
        by_row = 0.0
        by_first = 0.0
        by_second = 0.0
        if s.SCALES == "blocks":
            by_row = team_rows(s, s.ss.index(slot).reshape((s.BM,)), TEAM).load(gl.SliceLayout(1, mma))
            at = slot * LINE + block % ALIGNED
            by_first = _scale(numbers, at)
            if s.BN > HALF:
                by_second = _scale(numbers, at + LINE // 2)
        x = team_rows(s, s.sa.index(slot), TEAM)
        y = s.sb.index(slot)
        part = warpgroup_mma(x, y.slice(0, HALF).permute((1, 0)), nothing, use_acc=False, is_async=True)
        barrier()
        mbarrier.arrive(s.empty.index(slot_before(slot, s.STAGES)), count=1, pred=block > 0)
        barrier()
        following, phase = advance(slot, phase, s.STAGES)
        if s.BN > HALF:
            first = _added(first, part, by_row, by_first, s.SCALES)
            first = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [first], gl.float32, is_pure=False, pack=1)
            part = warpgroup_mma(x, y.slice(HALF, HALF).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(s.full.index(following), phase, pred=block + 1 < kt)
        if s.BN > HALF:
            second = _added(second, part, by_row, by_second, s.SCALES)
        else:
            first = _added(first, part, by_row, by_first, s.SCALES)
        slot = following
    barrier()
    mbarrier.arrive(s.empty.index(slot_before(slot, s.STAGES)), count=1)
    return first, second, slot, phase


@gluon.jit
def product(s, slot, phase, kt, scale, bias, col, n, BIAS: gl.constexpr, TEAM: gl.constexpr):
    """See the module. ``scale``: of "tensor"; those of blocks are where *load* brings them."""
    mma: gl.constexpr = tile_layout(s.BN, 256 // s.sa.dtype.primitive_bitwidth, s.TEAMS)
    if s.PROMOTE:
        acc, second, slot, phase = _promoted(s, slot, phase, kt, TEAM)
        if s.BN > HALF:
            both = gl.permute(gl.join(acc, second), (0, 2, 1))
            acc = gl.convert_layout(gl.reshape(both, (s.BM // s.TEAMS, s.BN)), mma)
    else:
        acc, slot, phase = multiply_tile(s, slot, phase, kt, bias, col, n, BIAS and s.SCALES is None, TEAM)
    if s.SCALES == "tensor":
        acc = gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [acc, scale], gl.float32, True, 1)
    if BIAS and s.SCALES is not None:
        cols = col + gl.arange(0, s.BN, layout=gl.SliceLayout(0, mma))
        acc += gl.expand_dims(gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32), 0)
    return acc, slot, phase
