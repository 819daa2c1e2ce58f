"""Who sends what to whom in which turn, between GPUs that share PCIe: arithmetic only.

On PCIe one stream out of each GPU and one into it is as much as there is; when all write to all at once, everything
collapses. So a schedule is a list of *turns*. In each, every rank sends one block to one rank and gets one from one.

*Flat*: in turn ``d`` rank ``r`` sends to ``r + d``.

*Two islands*: GPUs of one host that hang at two processors reach each other through what connects these, which is
slower than a GPU's own link and shared by all pairs that cross it.

* A gather has each block cross once, to the rank at the same place of the other island, which forwards it there. Flat,
  each would cross once for every rank there. The ranks of an island cross in turns, one at a time, while the others
  send their own blocks among each other; then what came from the other island goes round. No rank is ever idle. Where
  an island is of two there is no such order (nor is one known here for six and more, if even): all cross first.
* In an exchange every block is for one rank alone, so as many must cross as there are pairs. Islands take places on the
  ring between each other, so that they cross in all turns and few in each: of 4 + 4 ranks two or three of 16, where the
  natural order has four in the middle and one at the ends.

Source: the two-level rings of FLUX (arXiv 2406.06858, between NUMA nodes first, then within); here blocks are exchanged
directly, and forwarded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

Islands = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks of both, as many of each."""

_PASS = {4: ((0, 2, 3, 1), (3, 1, 0, 2), (1, 3, 2, 0), (2, 0, 1, 3))}
"""By size of an island and turn, to which place of it each place sends; the one that stays crosses. Every place sends
to every other once: a tetrahedron's faces, gone round."""


class Move(NamedTuple):
    """One block's way in one turn."""

    source: int
    target: int
    origin: int  # whose block it is


class Turn(NamedTuple):
    """What one rank does in one turn."""

    target: int
    sent: int  # whose block it sends
    source: int
    received: int  # whose block it gets


def gather(tp: int, islands: Islands | None) -> list[list[Move]]:
    """The turns of a gather: every rank's block to all others."""
    if islands is None:
        return _ring(range(tp))
    size = len(islands[0])
    opposite = dict(zip(islands[0] + islands[1], islands[1] + islands[0], strict=True))
    turns = [
        [
            Move(island[at], opposite[island[at]] if to == at else island[to], island[at])
            for island in islands
            for at, to in enumerate(places)
        ]
        for places in _passing(size)
    ]
    return turns + [
        [Move(island[at], island[(at + d) % size], opposite[island[at]]) for island in islands for at in range(size)]
        for d in range(1, size)
    ]


def exchange(tp: int, islands: Islands | None) -> list[list[Move]]:
    """The turns of an exchange: from every rank to every other a block of its own."""
    if islands is None:
        return _ring(range(tp))
    places, ring = _between(len(islands[0])), [0] * tp
    rest = [at for at in range(tp) if at not in places]
    for at, rank in zip([*places, *rest], islands[0] + islands[1], strict=True):
        ring[at] = rank
    return _ring(ring)


def of_rank(turns: Sequence[Sequence[Move]], rank: int) -> list[Turn]:
    """What ``rank`` does."""
    found = []
    for moves in turns:
        out = next(move for move in moves if move.source == rank)
        into = next(move for move in moves if move.target == rank)
        found.append(Turn(out.target, out.origin, into.source, into.origin))
    return found


def _ring(ring: Sequence[int]) -> list[list[Move]]:
    tp = len(ring)
    return [[Move(rank, ring[(at + d) % tp], rank) for at, rank in enumerate(ring)] for d in range(1, tp)]


def _passing(size: int) -> Sequence[Sequence[int]]:
    """By turn, to which place of its island each place sends its own block; to itself: across."""
    if size in _PASS:
        return _PASS[size]
    if size % 2:
        return [[(2 * turn - at) % size for at in range(size)] for turn in range(size)]
    return [[(at + d) % size for at in range(size)] for d in range(size)]


@functools.cache
def _between(size: int) -> tuple[int, ...]:
    """The places of one island on the ring of both, such that the fewest cross in the turn in which most do."""
    ring = 2 * size

    def most(rest: tuple[int, ...]) -> int:
        places = {0, *rest}
        return max(sum((at + d) % ring not in places for at in places) for d in range(1, ring))

    return 0, *min(combinations(range(1, ring), size - 1), key=most)
