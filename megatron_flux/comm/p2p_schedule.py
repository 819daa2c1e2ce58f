"""Schedule of the link through peers' memory: who sends what to whom, and what a rank enqueues for it. No GPU.

Rounds
    On PCIe one stream out of each GPU and one into it is as much as there is; when all write to all at once, everything
    collapses. So a schedule is a list of *rounds*. In each, every rank sends one block to one rank and receives one.

    *Flat*: in round ``d`` rank ``r`` sends to ``r + d``.

    *Two islands*: GPUs of one host that hang at two processors reach each other through what connects these, which is
    slower than a GPU's own link and shared by all pairs that cross it.

    * In a gather each block crosses once, to the rank at the same place of the other island, which forwards it there.
      Flat, each would cross once for every rank there. The ranks of an island cross one at a time, while the others
      send their own blocks among each other; then what came from the other island goes round. No rank is ever idle.
      With islands of two there is no such order (nor is one known for even sizes from six): all cross first.
    * In an exchange every block is for one rank alone, so as many must cross as there are pairs. Islands take places on
      the ring between each other, so that some cross in every round and few in each: of 4 + 4 ranks two or three of
      16, where the natural order has four in the middle and one at the ends.

    Source: the two-level rings of FLUX (arXiv 2406.06858, between NUMA nodes first, then within); here blocks are
    exchanged directly, and forwarded once.

Slots and words
    Every rank owns slots in its GPU's memory, which this round's sender writes into, and a region of words in shared
    host memory, one for each slot of each peer that it sends to::

        CLOSED   at rest: not this sender's round
        EMPTY    the receiver has opened the slot for it
        FULL     the sender's copy has arrived

    A receiver opens its slots for the next round's sender behind the last copy of this round, so it never has two. It
    sets a slot that it has emptied to EMPTY if more of this round comes through it, else to CLOSED. A sender waits for
    the slots of a round together, as far as there are slots: a wait takes longer than a word.

Hazard: with one hardware queue the whole program is one queue. S(i) is the sending of chunk i of a round, R(i) the
receiving.

* The order in a round is S(0) ... S(a), R(0), S(a + 1), R(1) ... with a = slots - 2, all of it before the next round.
  Words that end a step go with the lane's next step: FULL of S(i) with S(i + 1), EMPTY of R(i) with R(i + 1).
* So R(i) comes behind S(i + 1), or what ends the last S; S(i) behind R(i - slots + 1) or, where the slot is used for
  the first time, behind the end of the round before, which opens it.
* What is forwarded has come in an earlier round.

Nothing waits for what stands behind it or beside it: by induction over places there is no deadlock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from megatron_flux.comm.host_schedule import (
    EMPTY,
    FULL,
    MIB,
    Layout,
    Program,
    ProgramBuilder,
    Transfer,
)
from megatron_flux.comm.lanes import DOWN, UP, Behind, Mark, Wait
from megatron_flux.cuda_driver import WAIT, WRITE, Copy, WordOp

CLOSED = 2
OUT, IN = DOWN, UP

Islands = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks of both islands, equally many."""

_CROSSING_ORDERS = {4: ((0, 2, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0), (2, 0, 1, 3))}
"""Destination of each place in its island, by island size and round; to itself: across. Every place sends
to every other once: a tetrahedron's faces, gone round."""


class Move(NamedTuple):
    """One block's way in one round."""

    source: int
    target: int
    origin: int  # whose block it is


def gather(tp: int, islands: Islands | None) -> list[list[Move]]:
    """Return the rounds of a gather: every rank's block to all others."""
    if islands is None:
        return _ring(range(tp))
    size = len(islands[0])
    opposite = dict(zip(islands[0] + islands[1], islands[1] + islands[0], strict=True))
    rounds = [
        [
            Move(island[at], opposite[island[at]] if to == at else island[to], island[at])
            for island in islands
            for at, to in enumerate(places)
        ]
        for places in _crossing_order(size)
    ]
    return rounds + [
        [Move(island[at], island[(at + d) % size], opposite[island[at]]) for island in islands for at in range(size)]
        for d in range(1, size)
    ]


def exchange(tp: int, islands: Islands | None) -> list[list[Move]]:
    """Return the rounds of an exchange: from every rank to every other a block of its own."""
    if islands is None:
        return _ring(range(tp))
    places, ring = _places_between(len(islands[0])), [0] * tp
    others = [at for at in range(tp) if at not in places]
    for at, rank in zip([*places, *others], islands[0] + islands[1], strict=True):
        ring[at] = rank
    return _ring(ring)


def _ring(ring: Sequence[int]) -> list[list[Move]]:
    tp = len(ring)
    return [[Move(rank, ring[(at + d) % tp], rank) for at, rank in enumerate(ring)] for d in range(1, tp)]


def _crossing_order(size: int) -> Sequence[Sequence[int]]:
    """Return by round the place in its island to which each place sends its own block; to itself: across."""
    if size in _CROSSING_ORDERS:
        return _CROSSING_ORDERS[size]
    if size % 2:
        return [[(2 * i - at) % size for at in range(size)] for i in range(size)]
    return [[(at + d) % size for at in range(size)] for d in range(size)]


@functools.cache
def _places_between(size: int) -> tuple[int, ...]:
    """Return one island's places on the ring of both, such that the busiest round has the fewest crossings."""
    ring = 2 * size

    def most(rest: tuple[int, ...]) -> int:
        places = {0, *rest}
        return max(sum((at + d) % ring not in places for at in places) for d in range(1, ring))

    return 0, *min(combinations(range(1, ring), size - 1), key=most)


@dataclass(frozen=True)
class PeerLayout(Layout):
    """Slots in a rank's GPU, words in its region of host memory. A rank waits for its own words to become EMPTY, and
    for those that others have for it to become FULL.
    """

    slot_bytes: int = 4 * MIB

    @property
    def region_bytes(self) -> int:
        """Shared host memory of a rank: words alone."""
        return self.data

    @property
    def device_bytes(self) -> int:
        """Memory of a rank's GPU."""
        return self.slots * self.slot_pitch

    def slot(self, use: int) -> int:
        """Return the offset of the slot for the ``use``-th chunk of a round."""
        return use % self.slots * self.slot_pitch


def program(
    layout: PeerLayout, rank: int, regions: Sequence[int], slots: Sequence[int], cuts: Sequence[int],
    rounds: Sequence[Sequence[Move]], *, exchange: bool,
) -> Program:  # fmt: skip
    """Build the program of a call whose blocks are cut at ``cuts``; ``regions``, ``slots``: addresses of all ranks'.

    Its parts: of a gather, what can leave before anything is waited for, then each round; of an exchange, each round.
    """
    builder, own = ProgramBuilder(regions[rank], cuts[-1], exchange=exchange), regions[rank]
    parts = layout.chunks(cuts)
    mine = [
        (next(move for move in moves if move.source == rank), next(move for move in moves if move.target == rank))
        for moves in rounds
    ]
    plan = [(piece, out, into) for piece in range(len(parts)) for out, into in mine]

    def opening(number: int) -> list[WordOp]:
        """Return the words that let the sender of this round begin."""
        if number == len(plan):
            return []
        piece, _, into = plan[number]
        first = range(min(len(parts[piece]), layout.slots))
        return [WordOp(WRITE, regions[into.source] + layout.word(use, rank), EMPTY) for use in first]

    builder.words[IN].extend(opening(0))
    builder.step(IN)
    for number, (piece, out, into) in enumerate(plan):
        if out.origin != rank and plan[number - 1][1].origin == rank:  # what is forwarded has come by then
            builder.steps += [Mark(IN), Behind((OUT,))]
        sends, receives = [], []
        count, base = len(parts[piece]), out.target * cuts[-1] if exchange else 0
        row = layout.tp if out.origin == rank else out.origin
        for use, (offset, nbytes) in enumerate(parts[piece]):
            opened = range(min(count, layout.slots)) if use == 0 else [use] if use >= layout.slots else []
            words = [own + layout.word(one, out.target) for one in opened]
            sends.append(Transfer(
                [(WordOp(WAIT, word, EMPTY), Wait(out.target, out.origin)) for word in words],
                [Copy(row, base + offset, slots[out.target] + layout.slot(use), nbytes)],
                [WordOp(WRITE, own + layout.word(use, out.target), FULL)],
            ))  # fmt: skip
            word = regions[into.source] + layout.word(use, rank)
            receives.append(Transfer(
                [(WordOp(WAIT, word, FULL), Wait(into.source, into.origin))],
                [Copy(into.origin, offset, slots[rank] + layout.slot(use), nbytes)],
                [WordOp(WRITE, word, EMPTY if use + layout.slots < count else CLOSED),
                 *(opening(number + 1) if use == count - 1 else ())],
            ))  # fmt: skip
        builder.interleave(layout.slots, sends, receives, last=number == len(plan) - 1)
        builder.end_part([(out.target if exchange else into.origin, piece)])
    return builder.program
