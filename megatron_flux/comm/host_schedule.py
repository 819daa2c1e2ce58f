"""Memory layout and schedule of the link through host memory: arithmetic and addresses, no GPU.

Layout
    Every rank owns one region, which it alone writes data into and which all ranks of the group map::

        [head: counters of the owner][words][slots]

    The slots are a ring. Everything a rank sends goes through it in *chunks* of at most a slot's size, to one peer
    (reduce-scatter) or to all of them (all-gather: the shard is copied to host memory once). Each slot has a word per
    reader: EMPTY or FULL. The writer waits until the words of all readers are EMPTY, copies, and sets FULL for the
    readers that the data is for. A reader waits for FULL, copies, and sets EMPTY. Words return to their old values, so
    a schedule depends on nothing but sizes and is built once per size.

    Slots are small and few, so that data stays in the last-level cache between write and read. In large slots
    everything goes through memory twice, and four GPUs share that bandwidth.

Schedule
    A call runs the steps of a :class:`Program`: batches of memory operations and then copies, each in one lane. All
    ranks run programs of the same form that differ only in who the peers are. Two lanes each way were no faster
    (results/host-link-h200x2: 101 MB in 2.46 ms at best, one lane 2.49) and cost more host time.

Hazard: with one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron asks for) the whole program is one
queue, in which a wait holds back everything behind it. So no wait may stand before what ends it on a peer *in the order
of the whole program*:

* S(i), writing chunk i, waits for the peers' reads R(i - slots). R(i) waits for their S(i).
* Words that end a step are written with those that begin the lane's next one (fewer driver calls): FULL of S(i) with
  S(i + 1), EMPTY of R(i) with R(i + 1).
* The order is S(0) ... S(a), R(0), S(a + 1), R(1) ... with a = slots - 2, at least 1, from the first chunk of a call to
  its last. So R(i) comes behind S(i + 1), or behind what ends the last S, and S(i) comes behind R(i - slots + 1).
* GEMMs stand between them in the same places on all ranks. In an exchange what is behind S(i) in this order is read
  when the next blocks are sent: FULL of a block's last chunk is written when the next block's product is there.

Nothing waits for what stands behind it or beside it: by induction over places there is no deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_flux.comm.lanes import CALLER, DOWN, LANES, UP, Batch, Behind, Enqueued, Mark, Step, Wait
from megatron_flux.cuda_driver import VALUE, WAIT, WRITE, Copy, WordOp
from megatron_flux.errors import UserError

EMPTY, FULL = 0, 1
PAGE = 4096
LINE = 64
"""Bytes between words: words that share a cache line would slow each other's writers."""
MIB = 1 << 20

BEGUN = 0
"""Offset in the head: number of the last call that the owner has begun."""
EPOCH, POSITION, BUSY = 0, 4, 8
"""A lane's progress, from its own line in the head: its call, the batch within it, and whether it is in it still."""
HEAD = PAGE
MIN_SLOTS = 3
"""One is written and one read at a time, and words are enqueued one chunk late."""


def progress_word(lane: int, what: int) -> int:
    """Return the offset of a lane's EPOCH, POSITION or BUSY word in its owner's region."""
    return (1 + lane) * LINE + what


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes within one rank's region, for a group of ``tp`` ranks."""

    tp: int
    slot_bytes: int = 2 * MIB
    slots: int = 4

    def __post_init__(self) -> None:
        if self.slots < MIN_SLOTS:
            raise UserError(f"a link needs at least {MIN_SLOTS} slots, {self.slots} were given")

    @property
    def slot_pitch(self) -> int:
        """Bytes from one slot to the next."""
        return _round_up(self.slot_bytes, PAGE)

    @property
    def data(self) -> int:
        """Offset of the first slot."""
        return HEAD + _round_up(self.slots * self.tp * LINE, PAGE)

    @property
    def region_bytes(self) -> int:
        """Size of a rank's region."""
        return self.data + self.slots * self.slot_pitch

    @property
    def total_bytes(self) -> int:
        """Shared memory of all ranks of the group."""
        return self.tp * self.region_bytes

    def slot(self, use: int) -> int:
        """Return the offset of the slot for the ``use``-th chunk of a call."""
        return self.data + use % self.slots * self.slot_pitch

    def chunks(self, cuts: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return for each piece of a block that is cut at ``cuts`` its chunks, as ``(offset, nbytes)``."""
        return [chunks(first, last, self.slot_bytes) for first, last in itertools.pairwise(cuts)]

    def word(self, use: int, reader: int) -> int:
        """Return the offset of that slot's word for rank ``reader``."""
        return HEAD + (use % self.slots * self.tp + reader) * LINE

    def own_words(self) -> range:
        """Return the offsets of all words of a region."""
        return range(HEAD, HEAD + self.slots * self.tp * LINE, LINE)

    def words_of(self, reader: int) -> list[int]:
        """Return the offsets of the words that rank ``reader`` waits for and empties."""
        return [self.word(use, reader) for use in range(self.slots)]


def default_layout(tp: int) -> Layout:
    """Return the layout for ``tp`` ranks, at most four of which have room in the 64 MB of a container.

    Larger slots take fewer calls of the driver. Between two H100s (results/host-link-x2: 32 MB each way) four slots of
    6 MB take 0.95 ms in the mean and the host 153 us, of 4 MB 0.97 ms and 179 us, three of 8 MB 1.04 ms and 137 us.
    With more GPUs, smaller slots leave room in the cache for all; that was not measured.
    """
    return Layout(tp, (6 if tp == 2 else 2) * MIB)


def chunks(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """Cut bytes into few ``(offset, nbytes)`` of about equal size: a short one takes the host as long as a long one."""
    total = last - first
    if total <= 0:
        return []
    count = -(-total // most)
    size = min(most, _round_up(-(-total // count), 512))
    return [(offset, min(size, last - offset)) for offset in range(first, last, size)]


class Part(NamedTuple):
    """Steps that are enqueued together. A copy's ``row`` is a peer's number, or tp for what is sent."""

    steps: list[Enqueued]
    pieces: Sequence[tuple[int, int]]  # ``(peer, piece)``: what has arrived then, or of an exchange what is sent


@dataclass
class Program:
    """Everything a rank enqueues for one call."""

    nbytes: int
    operator: str = ""
    parts: list[Part] = field(default_factory=list)
    """A gather's: steps that need no wait, then one part per piece. An exchange's: one per block, as they are sent."""
    batches: tuple[list[Batch], ...] = field(default_factory=lambda: tuple([] for _ in LANES))
    """By lane. A batch writes its index into the head when it begins."""
    laid_out: list[Any] = field(default_factory=list)
    """For :meth:`run` of the link's lanes: a gather's parts; what is behind an exchange's products, and the rest."""
    read: Any = ()  # puts the caller behind all that has been enqueued upwards
    sent: Any = ()  # the same downwards

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The pieces of all parts, in their order."""
        return [piece for part in self.parts for piece in part.pieces]

    def lay_out(self, laid_out: Callable[[Sequence[Enqueued]], Any], *, exchange: bool) -> None:
        """Lay out all that is enqueued."""
        read_all, sent_all = (Mark(UP), Behind((CALLER,))), (Mark(DOWN), Behind((CALLER,)))
        self.read, self.sent = laid_out(read_all), laid_out(sent_all)
        lists = [part.steps for part in self.parts]
        if exchange:
            # A part waits for the product that it sends, and comes behind the next one in a queue that they share.
            lists = [[Behind(LANES if at == 0 else (DOWN,)), *steps] for at, steps in enumerate(lists)]
            lists = [[Mark(CALLER)], *([*steps, Mark(CALLER)] for steps in lists[:-1]), lists[-1]]
        else:
            lists[0] = [Mark(CALLER), Behind(LANES), *lists[0]]
        self.laid_out = [laid_out(steps) for steps in lists]

    def stamp(self, epoch: int) -> None:
        """Set the number of the next call."""
        for batches in self.batches:
            if batches:
                for row in batches[0].stamped:
                    batches[0].table[row, VALUE] = epoch


class Transfer(NamedTuple):
    """One end of a slot's use: what to wait for, what to copy, and the words to write behind it."""

    waits: Sequence[tuple[WordOp, Wait]] = ()
    copies: Sequence[Copy] = ()
    words: Sequence[WordOp] = ()


NOTHING = Transfer()


class ProgramBuilder:
    """Builds a program; holds a step's closing words back until the lane's next step."""

    def __init__(self, region: int, nbytes: int, *, exchange: bool) -> None:
        """``region``: address of the rank's own region; ``nbytes``: size of a block."""
        self.program = Program(nbytes)
        self.words: tuple[list[WordOp], ...] = tuple([] for _ in LANES)
        """To be written with each lane's next step."""
        self.steps: list[Enqueued] = []
        self._region, self._exchange = region, exchange

    def step(self, lane: int, transfer: Transfer = NOTHING, *, last: bool = False) -> None:
        """Write the closing words of the lane's last step, wait and copy. ``last``: the call ends in this lane."""
        batches = self.program.batches[lane]
        epoch, position, busy = (self._region + progress_word(lane, what) for what in (EPOCH, POSITION, BUSY))
        stamped: list[int] = []
        operations: list[WordOp] = []
        if not batches:
            stamped = [epoch, self._region + BEGUN] if lane == DOWN else [epoch]
            operations = [*(WordOp(WRITE, word, 0) for word in stamped), WordOp(WRITE, busy, 1)]
        operations.append(WordOp(WRITE, position, len(batches)))
        operations += self.words[lane]
        operations += [operation for operation, _ in transfer.waits]
        if last:
            operations.append(WordOp(WRITE, busy, 0))
        batches.append(Batch(operations, [wait for _, wait in transfer.waits], range(len(stamped))))
        self.words[lane][:] = transfer.words
        self.steps.append(Step(lane, batches[-1], tuple(transfer.copies)))

    def end_part(self, pieces: Sequence[tuple[int, int]] = ()) -> None:
        """Close the current part."""
        self.program.parts.append(Part(self.steps, pieces))
        self.steps = []

    def interleave(
        self, slots: int, writes: Sequence[Transfer], reads: Sequence[Transfer], *, last: bool = True,
        ends: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> None:  # fmt: skip
        """Add writes and as many reads in the order that the module gives. ``ends``: the pieces of parts, by the read
        of a gather that ends one, or the write of an exchange.
        """
        count, ends = len(writes), ends or {}
        ahead = slots - 2
        for i in range(count + ahead):
            if i < count:
                self.step(DOWN, writes[i])
            if i == count - 1:
                self.step(DOWN, last=last)
            if (j := i - ahead) >= 0:
                if not self.program.parts and not self._exchange:
                    self.end_part()
                self.step(UP, reads[j])
                if j == count - 1:
                    self.step(UP, last=last)
            if (end := i if self._exchange else j) in ends:
                self.end_part(ends[end])


def program(layout: Layout, rank: int, regions: Sequence[int], cuts: Sequence[int], *, exchange: bool) -> Program:
    """Build the program of a call whose blocks are cut at ``cuts``; ``regions``: addresses of all ranks' regions.

    A gather's chunks are for all peers. In step ``d`` of a piece of an exchange rank ``r`` sends to ``r + d``; what is
    sent to a peer begins at its number of blocks.
    """
    tp, own = layout.tp, regions[rank]
    peers = [(rank + d) % tp for d in range(1, tp)]
    writes: list[Transfer] = []
    reads: list[Transfer] = []
    ends: dict[int, list[tuple[int, int]]] = {}
    for piece, every in enumerate(layout.chunks(cuts)):
        for targets in [[peer] for peer in peers] if exchange else [peers]:
            # In an exchange one peer sends to this rank while this one sends to another.
            sources = [(2 * rank - peer) % tp for peer in targets] if exchange else targets
            begin = targets[0] * cuts[-1] if exchange else 0
            for use, (offset, nbytes) in enumerate(every, len(writes)):
                writes.append(Transfer(
                    # Any of them may have read this slot last.
                    [(WordOp(WAIT, own + layout.word(use, to), EMPTY), Wait(to, to if exchange else rank))
                     for to in peers],
                    [Copy(tp, begin + offset, own + layout.slot(use), nbytes)],
                    [WordOp(WRITE, own + layout.word(use, to), FULL) for to in targets],
                ))  # fmt: skip
                words = {source: regions[source] + layout.word(use, rank) for source in sources}
                reads.append(Transfer(
                    [(WordOp(WAIT, word, FULL), Wait(source, rank if exchange else source))
                     for source, word in words.items()],
                    [Copy(source, offset, regions[source] + layout.slot(use), nbytes) for source in sources],
                    [WordOp(WRITE, word, EMPTY) for word in words.values()],
                ))  # fmt: skip
            if every:
                ends[len(writes) - 1] = [(peer, piece) for peer in targets]
    builder = ProgramBuilder(own, cuts[-1], exchange=exchange)
    rest = ends.popitem()[1] if exchange else None
    builder.interleave(layout.slots, writes, reads, ends=ends)
    if rest is not None:
        builder.end_part(rest)
    return builder.program
