"""What a rank enqueues for a call of the link through peers' memory, and what lies where: no GPU.

As :mod:`~megatron_flux.comm.host_program`, whose form it has, one lane being out and one in. Every rank owns slots in
its GPU's memory, which whoever has its turn writes into, and a region of words in shared host memory, one for each slot
of each peer it sends to::

    CLOSED   at rest: not this sender's turn
    EMPTY    the receiver has opened the slot for it
    FULL     the sender's copy has arrived

A receiver opens its slots for the sender of the next turn behind the last copy of this one, so it never has two. It
makes a slot that it has emptied EMPTY again if more of this turn comes through it, else CLOSED. A sender waits for the
slots of a turn together, as far as there are slots: a wait takes longer than a word.

Hazard: with one hardware queue the whole program is one queue. S(i) is the sending of chunk i of a turn, R(i) the
receiving.

* The order in a turn is S(0) ... S(a), R(0), S(a + 1), R(1) ... with a = slots - 2, and all of it comes before the next
  turn. Words that end a step go with the next step of the lane: FULL of S(i) with S(i + 1), EMPTY of R(i) with
  R(i + 1).
* So R(i) comes behind S(i + 1), or what ends the last S; S(i) behind R(i - slots + 1) or, where the slot is used for
  the first time, behind the end of the turn before, which opens it.
* What is forwarded has come in an earlier turn.

Nothing waits for what stands behind it or beside it: by induction over places there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_flux.comm.host_program import DOWN, UP, Copy, Ends, Program, Recipe
from megatron_flux.comm.host_ring import EMPTY, FULL, MIB, Layout, chunks
from megatron_flux.comm.lanes import Wait
from megatron_flux.comm.p2p_schedule import Move, of_rank
from megatron_flux.cuda_memory_ops import WAIT, WRITE, WordOp

CLOSED = 2
OUT, IN = DOWN, UP


@dataclass(frozen=True)
class PeerLayout(Layout):
    """Offsets in bytes within the words of one rank of ``tp``, and within its slots.

    Of a rank's own words EMPTY is what it waits for; FULL in those that others have for it.
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
        """The slot of the ``use``-th chunk of a turn."""
        return use % self.slots * self.slot_pitch


def program(
    layout: PeerLayout, rank: int, regions: Sequence[int], slots: Sequence[int], cuts: Sequence[int],
    turns: Sequence[Sequence[Move]], *, exchange: bool,
) -> Program:  # fmt: skip
    """Of a gather or an exchange of blocks with these ``cuts``; ``regions``, ``slots``: where those of all ranks begin.

    Its parts: of a gather, what can leave before anything is waited for, then each turn; of an exchange, each turn.
    """
    recipe, own = Recipe(regions[rank]), regions[rank]
    parts = [chunks(first, last, layout.slot_bytes) for first, last in itertools.pairwise(cuts)]
    plan = [(piece, turn) for piece in range(len(parts)) for turn in of_rank(turns, rank)]

    def opened(number: int) -> list[WordOp]:
        """What lets the sender of this turn begin."""
        if number == len(plan):
            return []
        piece, turn = plan[number]
        first = range(min(len(parts[piece]), layout.slots))
        return [WordOp(WRITE, regions[turn.source] + layout.word(use, rank), EMPTY) for use in first]

    def ends(number: int) -> tuple[Callable[[int], Ends], Callable[[int], Ends]]:
        """Sending and receiving chunks of this turn."""
        piece, turn = plan[number]
        chunk, base = parts[piece], cuts[piece] if exchange else 0
        row = layout.tp if turn.sent == rank else turn.sent

        def waits(use: int) -> list[tuple[WordOp, Wait]]:
            first = range(min(len(chunk), layout.slots)) if use == 0 else [use] if use >= layout.slots else []
            return [
                (WordOp(WAIT, own + layout.word(i, turn.target), EMPTY), Wait(turn.target, turn.sent)) for i in first
            ]

        def send(use: int) -> Ends:
            offset, nbytes = chunk[use]
            copy = Copy(row, offset - base, slots[turn.target] + layout.slot(use), nbytes)
            return Ends(waits(use), [copy], [WordOp(WRITE, own + layout.word(use, turn.target), FULL)])

        def receive(use: int) -> Ends:
            offset, nbytes = chunk[use]
            word = regions[turn.source] + layout.word(use, rank)
            return Ends(
                [(WordOp(WAIT, word, FULL), Wait(turn.source, turn.received))],
                [Copy(turn.received, offset, slots[rank] + layout.slot(use), nbytes)],
                [
                    WordOp(WRITE, word, EMPTY if use + layout.slots < len(chunk) else CLOSED),
                    *(opened(number + 1) if use == len(chunk) - 1 else ()),
                ],
            )

        return send, receive

    recipe.say(IN, opened(0))
    for number, (piece, turn) in enumerate(plan):
        (send, receive), count, ahead = ends(number), len(parts[piece]), layout.slots - 2
        forwards = turn.sent != rank and plan[number - 1][1].sent == rank
        for i in range(count + ahead):
            if i < count:
                recipe.step(OUT, send(i), after=IN if forwards and i == 0 else None)
            if i == count - 1:
                recipe.flush(OUT, last=number == len(plan) - 1)
            if i >= ahead:
                if number == 0 and i == ahead and not exchange:
                    recipe.end_part()
                recipe.step(IN, receive(i - ahead))
        recipe.flush(IN, last=number == len(plan) - 1)
        recipe.end_part(() if exchange else [(turn.received, piece)])
    return recipe.program
