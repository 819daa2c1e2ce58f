"""What a rank enqueues for a call of the link through host memory, in order: arithmetic and addresses, no GPU.

It depends on nothing but sizes, so it is made once for them. A call goes through the steps of a :class:`Program`: each
is memory operations and then copies, in one lane. Two lanes each way, of which one copies while the other waits for
words, looked no faster (results/host-link-h200x2: 101 MB in 2.46 ms at best, on another machine than one lane's 2.49)
and cost more host time.

Contract: all ranks go through programs of the same form, differing only in who the peers are.

Hazard: with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron asks for) the whole program is one
queue, in which a wait holds back everything behind it. So no wait may stand before what ends it on a peer *in the order
of the whole program*:

* S(i), writing chunk i, waits for the end of the reading R(i - slots) of peers; R(i) for the end of their S(i).
* Words that end a step are written together with those that begin the next one in that lane (fewer calls of the
  driver): FULL of S(i) with S(i + 1), EMPTY of R(i) with R(i + 1).
* The order is S(0) ... S(a), R(0), S(a + 1), R(1) ... with a = slots - 2, at least 1. So R(i) comes behind S(i + 1), or
  behind what ends the last S; and S(i) behind R(i - slots + 1).
* GEMMs stand between them in the same places on all ranks.

Nothing waits for what stands behind it or beside it: by induction over places there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_flux.comm import transport
from megatron_flux.comm.host_ring import BEGUN, BUSY, EMPTY, EPOCH, FULL, POSITION, Layout, chunks, place
from megatron_flux.comm.lanes import Batch, Wait
from megatron_flux.cuda_memory_ops import WAIT, WRITE, WordOp

DOWN, UP = LANES = (0, 1)
"""Lanes: from the device to host memory, and back."""


class Copy(NamedTuple):
    """Between the device and a slot."""

    row: int  # of the tensor on the device: a peer's number, or tp for what is sent
    offset: int  # in that row
    host: int  # address of the slot
    nbytes: int


class Step(NamedTuple):
    """Of one lane."""

    lane: int
    batch: Batch
    copies: tuple[Copy, ...]
    after: int | None  # the lane that it comes behind, with all that this has been given by now


class Part(NamedTuple):
    """Steps that are enqueued together."""

    steps: list[Step]
    arrived: Sequence[tuple[int, int]]  # of a gather: ``(peer, piece)`` that are here when they have run


@dataclass
class Program:
    """See the module."""

    parts: list[Part] = field(default_factory=list)
    """Of a gather: what can leave before anything is waited for, then until each piece is here. Of an exchange: what
    each block needs, in the order of :func:`~megatron_flux.comm.transport.steps`."""

    batches: tuple[list[Batch], ...] = field(default_factory=lambda: tuple([] for _ in LANES))
    """Of each lane; each writes down its number in here as it begins."""

    def stamp(self, epoch: int) -> None:
        """Let ``epoch`` be the number of the next call."""
        for of_lane in self.batches:
            if of_lane:
                of_lane[0].stamp(epoch)


class Ends(NamedTuple):
    """The two ends of a slot, as this rank sees them: waits, copies, and the words behind them."""

    waits: list[tuple[WordOp, Wait]]
    copies: list[Copy]
    words: list[WordOp]


class Recipe:
    """Puts a program together: keeps back what ends one step of a lane until the next begins."""

    def __init__(self, region: int) -> None:
        self.program = Program()
        self._region = region
        self._words: tuple[list[WordOp], ...] = tuple([] for _ in LANES)
        self._steps: list[Step] = []

    def step(self, lane: int, ends: Ends, after: int | None = None) -> None:
        """Wait and copy; the words come with the next step of the lane."""
        self._step(lane, ends.waits, ends.copies, after=after)
        self._words[lane].extend(ends.words)

    def say(self, lane: int, words: Sequence[WordOp]) -> None:
        """Write ``words`` now."""
        self._words[lane].extend(words)
        self._step(lane)

    def flush(self, lane: int, *, last: bool) -> None:
        """Write what ends its last step; ``last``: of the call."""
        self._step(lane, last=last)

    def end_part(self, arrived: Sequence[tuple[int, int]] = ()) -> None:
        """What comes from here on is enqueued later."""
        self.program.parts.append(Part(self._steps, arrived))
        self._steps = []

    def in_turns(
        self,
        count: int,
        slots: int,
        write: Callable[[int], Ends],
        fetch: Callable[[int], Ends],
        fetched: Callable[[int], None],
        *,
        last: bool,
    ) -> None:
        """``count`` writings and fetchings in the order that the module gives; ``last``: none come behind them.
        ``fetched`` is called behind each fetching.
        """
        ahead = slots - 2
        for i in range(count + ahead):
            if i < count:
                self.step(DOWN, write(i))
            if i == count - 1:
                self.flush(DOWN, last=last)
            if (j := i - ahead) >= 0:
                self.step(UP, fetch(j))
                if j == count - 1:
                    self.flush(UP, last=last)
                fetched(j)

    def _step(
        self,
        lane: int,
        waits: Sequence[tuple[WordOp, Wait]] = (),
        copies: Sequence[Copy] = (),
        *,
        last: bool = False,
        after: int | None = None,
    ) -> None:
        known, at = self.program.batches[lane], self._region + place(lane, 0)
        stamped = [] if known else [at + EPOCH, *([self._region + BEGUN] if lane == DOWN else [])]
        marks = [WordOp(WRITE, word, 0) for word in stamped]
        marks += [] if known else [WordOp(WRITE, at + BUSY, 1)]
        marks.append(WordOp(WRITE, at + POSITION, len(known)))
        ends = [WordOp(WRITE, at + BUSY, 0)] if last else []
        operations = [*marks, *self._words[lane], *(operation for operation, _ in waits), *ends]
        known.append(Batch(operations, [wait for _, wait in waits], range(len(stamped))))
        self._words[lane].clear()
        self._steps.append(Step(lane, known[-1], tuple(copies), after))


def gather(layout: Layout, rank: int, regions: Sequence[int], cuts: Sequence[int]) -> Program:
    """Of a gather of blocks with these ``cuts``; ``regions``: where those of all ranks begin."""
    tp, own = layout.tp, regions[rank]
    peers = [(rank + d) % tp for d in range(1, tp)]
    recipe = Recipe(own)
    parts = [
        (piece, offset, nbytes)
        for piece, (first, last) in enumerate(itertools.pairwise(cuts))
        for offset, nbytes in chunks(first, last, layout.slot_bytes)
    ]

    def write(use: int) -> Ends:
        _, offset, nbytes = parts[use]
        words = {peer: own + layout.word(use, peer) for peer in peers}
        return Ends(
            [(WordOp(WAIT, word, EMPTY), Wait(peer, rank)) for peer, word in words.items()],
            [Copy(tp, offset, own + layout.slot(use), nbytes)],
            [WordOp(WRITE, word, FULL) for word in words.values()],
        )

    def fetch(use: int) -> Ends:
        if not use:
            recipe.end_part()
        _, offset, nbytes = parts[use]
        words = {peer: regions[peer] + layout.word(use, rank) for peer in peers}
        return Ends(
            [(WordOp(WAIT, word, FULL), Wait(peer, peer)) for peer, word in words.items()],
            [Copy(peer, offset, regions[peer] + layout.slot(use), nbytes) for peer in peers],
            [WordOp(WRITE, word, EMPTY) for word in words.values()],
        )

    def fetched(use: int) -> None:
        if use == len(parts) - 1 or parts[use + 1][0] != parts[use][0]:
            recipe.end_part([(peer, parts[use][0]) for peer in peers])

    recipe.in_turns(len(parts), layout.slots, write, fetch, fetched, last=True)
    return recipe.program


def exchange(layout: Layout, rank: int, regions: Sequence[int], cuts: Sequence[int]) -> Program:
    """Of an exchange of blocks with these ``cuts``, in the order of :func:`~megatron_flux.comm.transport.steps`."""
    tp, own = layout.tp, regions[rank]
    readers = [(rank + d) % tp for d in range(1, tp)]
    recipe, use = Recipe(own), 0
    order = transport.steps(rank, tp, len(cuts) - 1)
    for number, (peer, piece) in enumerate(order):
        source = transport.source(rank, tp, peer)
        parts = chunks(cuts[piece], cuts[piece + 1], layout.slot_bytes)

        def write(i: int, peer: int = peer, piece: int = piece, use: int = use, parts: Sequence = parts) -> Ends:
            offset, nbytes = parts[i]
            return Ends(
                # Whoever read this slot last.
                [(WordOp(WAIT, own + layout.word(use + i, to), EMPTY), Wait(to, to)) for to in readers],
                [Copy(tp, offset - cuts[piece], own + layout.slot(use + i), nbytes)],
                [WordOp(WRITE, own + layout.word(use + i, peer), FULL)],
            )

        def fetch(i: int, source: int = source, use: int = use, parts: Sequence = parts) -> Ends:
            offset, nbytes = parts[i]
            word = regions[source] + layout.word(use + i, rank)
            return Ends(
                [(WordOp(WAIT, word, FULL), Wait(source, rank))],
                [Copy(source, offset, regions[source] + layout.slot(use + i), nbytes)],
                [WordOp(WRITE, word, EMPTY)],
            )

        recipe.in_turns(len(parts), layout.slots, write, fetch, lambda i: None, last=number == len(order) - 1)
        recipe.end_part()
        use += len(parts)
    return recipe.program
