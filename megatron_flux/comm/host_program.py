"""What a rank enqueues for a call of the link through host memory, in order: arithmetic and addresses, no GPU.

It depends on nothing but sizes, so it is made once for them. A call goes through the actions of a :class:`Program`:
memory operations and copies, each for one lane, and between them where something has arrived.

Contract: all ranks go through programs of the same form, differing only in who the peers are.

Hazard: with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron asks for) the whole program is one
queue, in which a wait holds back everything behind it. So no wait may stand before what ends it on a peer *in the order
of the whole program*:

* S(i), writing chunk i, waits for the end of the reading R(i - slots) of peers; R(i) for the end of their S(i).
* Words that end a step are written together with those that begin the next one in that lane (fewer calls of the
  driver): EMPTY of R(j) with R(j + 1), FULL of S(j) with S(j + 1).
* The order is S(0) ... S(a), R(0), S(a + 1), R(1) ... with a = slots - 2, at least 1. So S(i) comes behind
  R(i - slots + 1), and R(i) behind S(i + 1), or behind what ends the last S.
* GEMMs stand between them in the same places on all ranks.

Nothing waits for what stands behind it or beside it: by induction over places there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_flux.comm import transport
from megatron_flux.comm.host_ring import EMPTY, FULL, POSITION, Layout, chunks, place
from megatron_flux.comm.lanes import Batch, Wait
from megatron_flux.cuda_memory_ops import WAIT, WRITE, WordOp

DOWN, UP = 0, 1


class Copy(NamedTuple):
    """Between the device and a slot."""

    lane: int
    row: int  # of the tensor on the device: a peer's number, or tp for what is sent
    offset: int  # in that row
    host: int  # address of the slot
    nbytes: int


class Words(NamedTuple):
    """Memory operations in a lane."""

    lane: int
    batch: Batch


class Arrived(NamedTuple):
    """All peers' bytes of a piece are here."""

    piece: int


class StepEnds(NamedTuple):
    """Of an exchange: what follows needs the next block."""

    peer: int


@dataclass
class Program:
    """See the module."""

    actions: list[Words | Copy | Arrived | StepEnds] = field(default_factory=list)
    batches: tuple[list[Batch], list[Batch]] = field(default_factory=lambda: ([], []))
    """Of each lane; each writes down its number in here as it begins."""


class Ends(NamedTuple):
    """The two ends of a channel's slot, as this rank sees them: a wait, a copy, and the words behind it."""

    waits: list[tuple[WordOp, Wait]]
    copies: list[Copy]
    words: list[WordOp]


class _Recipe:
    """Puts a program together: keeps back what ends one step of a lane until the next begins."""

    def __init__(self, region: int) -> None:
        self.program = Program()
        self._region = region
        self._words: tuple[list[WordOp], list[WordOp]] = ([], [])

    def step(self, lane: int, ends: Ends) -> None:
        """Wait, copy, and the words with the next step of the lane."""
        self._batch(lane, ends.waits)
        self.program.actions += ends.copies
        self._words[lane].extend(ends.words)

    def flush(self, lane: int) -> None:
        """Write what ends the last step."""
        if self._words[lane]:
            self._batch(lane, ())

    def in_turns(self, count: int, slots: int, write: Callable[[int], Ends], fetch: Callable[[int], Ends]) -> None:
        """``count`` writings and fetchings in the order that the module gives."""
        ahead = slots - 2
        for i in range(count + ahead):
            if i < count:
                self.step(DOWN, write(i))
            if i == count - 1:
                self.flush(DOWN)
            if i >= ahead:
                self.step(UP, fetch(i - ahead))
        self.flush(UP)

    def _batch(self, lane: int, waits: Sequence[tuple[WordOp, Wait]]) -> None:
        known = self.program.batches[lane]
        position = WordOp(WRITE, self._region + place(lane, POSITION), len(known))
        operations = [*self._words[lane], position, *(operation for operation, _ in waits)]
        known.append(Batch(operations, [wait for _, wait in waits]))
        self._words[lane].clear()
        self.program.actions.append(Words(lane, known[-1]))


def gather(layout: Layout, rank: int, regions: Sequence[int], cuts: Sequence[int]) -> Program:
    """Of a gather of blocks with these ``cuts``; ``regions``: where those of all ranks begin."""
    tp, own = layout.tp, regions[rank]
    peers = [(rank + d) % tp for d in range(1, tp)]
    recipe = _Recipe(own)
    parts = [
        (piece, offset, nbytes)
        for piece, (first, last) in enumerate(itertools.pairwise(cuts))
        for offset, nbytes in chunks(first, last, layout.slot_bytes)
    ]

    def write(use: int) -> Ends:
        _, offset, nbytes = parts[use]
        words = {peer: own + layout.shared_word(use, peer) for peer in peers}
        return Ends(
            [(WordOp(WAIT, word, EMPTY), Wait(peer, rank)) for peer, word in words.items()],
            [Copy(DOWN, tp, offset, own + layout.shared_slot(use), nbytes)],
            [WordOp(WRITE, word, FULL) for word in words.values()],
        )

    def fetch(use: int) -> Ends:
        _, offset, nbytes = parts[use]
        words = {peer: regions[peer] + layout.shared_word(use, rank) for peer in peers}
        return Ends(
            [(WordOp(WAIT, word, FULL), Wait(peer, peer)) for peer, word in words.items()],
            [Copy(UP, peer, offset, regions[peer] + layout.shared_slot(use), nbytes) for peer in peers],
            [WordOp(WRITE, word, EMPTY) for word in words.values()],
        )

    recipe.in_turns(len(parts), layout.shared_slots, write, fetch)
    _say_arrivals(recipe.program, [piece for piece, _, _ in parts], tp)
    return recipe.program


def _say_arrivals(program: Program, pieces: Sequence[int], tp: int) -> None:
    """Put an :class:`Arrived` behind the last fetch of each piece; ``pieces``: of each chunk."""
    actions: list[Words | Copy | Arrived | StepEnds] = []
    fetched = 0
    for action in program.actions:
        actions.append(action)
        if isinstance(action, Copy) and action.lane == UP:
            fetched += 1
            chunk, rest = divmod(fetched, tp - 1)
            if rest == 0 and (chunk == len(pieces) or pieces[chunk] != pieces[chunk - 1]):
                actions.append(Arrived(pieces[chunk - 1]))
    program.actions = actions


def exchange(layout: Layout, rank: int, regions: Sequence[int], cuts: Sequence[int]) -> Program:
    """Of an exchange of blocks with these ``cuts``, in the order of :func:`~megatron_flux.comm.transport.steps`."""
    tp, own = layout.tp, regions[rank]
    recipe = _Recipe(own)
    parts = [chunks(first, last, layout.slot_bytes) for first, last in itertools.pairwise(cuts)]
    before = [0, *itertools.accumulate(map(len, parts))]  # uses of a pair's slots in earlier pieces

    def write(peer: int, piece: int) -> Callable[[int], Ends]:
        def ends(i: int) -> Ends:
            use, (offset, nbytes) = before[piece] + i, parts[piece][i]
            word, slot = own + layout.pair_word(peer, use), own + layout.pair_slot(rank, peer, use)
            return Ends(
                [(WordOp(WAIT, word, EMPTY), Wait(peer, peer))],
                [Copy(DOWN, tp, offset - cuts[piece], slot, nbytes)],
                [WordOp(WRITE, word, FULL)],
            )

        return ends

    def fetch(peer: int, piece: int) -> Callable[[int], Ends]:
        def ends(i: int) -> Ends:
            use, (offset, nbytes) = before[piece] + i, parts[piece][i]
            word = regions[peer] + layout.pair_word(rank, use)
            slot = regions[peer] + layout.pair_slot(peer, rank, use)
            return Ends(
                [(WordOp(WAIT, word, FULL), Wait(peer, rank))],
                [Copy(UP, peer, offset, slot, nbytes)],
                [WordOp(WRITE, word, EMPTY)],
            )

        return ends

    for peer, piece in transport.steps(rank, tp, len(parts)):
        source = transport.source(rank, tp, peer)
        recipe.in_turns(len(parts[piece]), layout.pair_slots, write(peer, piece), fetch(source, piece))
        recipe.program.actions.append(StepEnds(peer))
    return recipe.program
