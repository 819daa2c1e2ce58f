"""Divide the tiles of the last round along k among SMs that would be idle, for the Hopper kernels.

``workers`` CTAs multiply the ``tiles`` of a call in rounds. Each of the ``left`` tiles of the last round is divided
along k into ``parts``, one for each of several CTAs. The CTA of the last part adds the sums of the others, in order,
and hands the tile over as if it had not been divided. :func:`megatron_flux.ops.kernel_config.last_round` says when
tiles are divided.

Contract
    * :func:`megatron_flux.ops.kernel_config.divided` says which calls. In FP8 results are bit-equal to cuBLASLt's;
      another order of sums would end that.
    * Units number the work: the tiles up to the last round, then all first parts of its tiles, all second parts, and so
      on. A unit's number modulo ``workers`` is its share. ``left * parts`` is at most ``workers``, so each part has a
      share of its own, in the same round.
    * ``sums`` (fp32, a tile for each SM) and ``summed``, flags of the slab that no peer writes, are this GPU's alone.

Hazard: the last part waits for the others, which kernels of other groups may keep from an SM. They are shares of lower
numbers. CTAs start in the order of their numbers, and a CTA that takes further shares takes higher ones, the lowest
first. So the lowest share that is not done waits for none, and all end even on one SM.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megatron_flux.kernels.device import publish
from megatron_flux.kernels.hopper.pieces import FENCE_SYSTEM, PIECE, barrier, each_thread, hand_over_tile, wait_flags


@gluon.jit
def part_of(unit, tiles, kt, left, parts, SPLIT_K: gl.constexpr):
    """Return a unit's tile, its k blocks from the first to the last, and whether its CTA hands the tile over."""
    t = unit
    first = kt * 0
    last = kt
    hands_over = left == left
    if SPLIT_K:
        whole = tiles - left
        if unit >= whole:
            part = (unit - whole) // left
            t = unit - part * left
            first = kt * part // parts
            last = kt * (part + 1) // parts
            hands_over = part == parts - 1
    return t, first, last, hands_over


@gluon.jit
def _at(acc, s, slot, col: gl.constexpr):
    """Where the numbers of a tile, from column ``col`` on, are among the sums of ``slot``: 8 x 8 of them in a line, as
    the threads of a warp hold them.
    """
    layout: gl.constexpr = acc.type.layout
    rows = gl.expand_dims(gl.arange(0, acc.type.shape[0], layout=gl.SliceLayout(1, layout)), 1)
    cols = col + gl.expand_dims(gl.arange(0, acc.type.shape[1], layout=gl.SliceLayout(0, layout)), 0)
    square = (slot * s.BM + rows // 8 * 8) * s.BN + cols // 8 * 64
    return square + rows % 8 * 8 + cols % 8


@gluon.jit
def _hand_over(acc, s, slot, phase, sums, i, left, parts, BN: gl.constexpr, col: gl.constexpr):
    """As :func:`hand_over_tile`, with what was summed of tile ``i`` of the last round: few registers at a time."""
    if BN == PIECE:
        for part in range(parts - 1):
            acc += gl.load(sums + _at(acc, s, part * left + i, col), cache_modifier=".cg")
        slot, phase = hand_over_tile(acc, s, slot, phase, BN, 0)
    else:
        first, second = gl.split(gl.permute(gl.reshape(acc, (s.BM, 2, BN // 2)), (0, 2, 1)))
        slot, phase = _hand_over(first, s, slot, phase, sums, i, left, parts, BN // 2, col)
        slot, phase = _hand_over(second, s, slot, phase, sums, i, left, parts, BN // 2, col + BN // 2)
    return slot, phase


@gluon.jit
def finish_part(
    acc, s, slot, phase, t, unit, hands_over, tiles, left, parts, sums, summed, epoch, err, limit, rank,
    OP: gl.constexpr,
):  # fmt: skip
    """Hand the tile ``t`` of a unit over, or keep its sum for the CTA that does."""
    whole = tiles - left
    if hands_over:
        all_parts = gl.where(unit < whole, 1, parts)
        for part in range(all_parts - 1):
            wait_flags(summed + part * left + t - whole, 1, epoch, err, limit, OP, rank, t, 50)
        slot, phase = _hand_over(acc, s, slot, phase, sums, t - whole, left, all_parts, s.BN, 0)
    else:
        gl.store(sums + _at(acc, s, unit - whole, 0), acc)
        barrier()
        each_thread(FENCE_SYSTEM, epoch)
        publish(summed, unit - whole, epoch, "relaxed")
    return slot, phase
