"""Where everything lies in the shared memory of the link through host memory. Arithmetic only.

Every rank owns one region, which it alone writes data into and all ranks of the group map::

    [head: counters of the owner][words][slots]

The slots are a ring that everything a rank sends goes through, to one peer (a reduce-scatter) or to all of them (an
all-gather: the rank copies its shard to host memory once). Each slot has a word for each reader: EMPTY, or FULL. The
writer waits until the words of all readers are EMPTY, copies, and makes FULL those of the readers it is for; a reader
waits until its own is FULL, copies, and makes it EMPTY. The words come back to where they were, so everything that a
call enqueues depends on nothing but the sizes of what it moves: it is laid out once per shape.

Slots are small, so that they stay in the processors' last-level cache between being written and being read: in large
ones everything goes through memory twice, which four GPUs share. Many are no better than few, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.errors import UserError

EMPTY, FULL = 0, 1

PAGE = 4096
LINE = 64
"""Bytes between words: two that lay in one line of the cache would be moved about by each other's writers."""
MIB = 1 << 20

BEGUN = 0
"""Offset in the head: the number of the last call that the owner has begun."""
LANES = LINE
"""Offset in the head of what the owner's first lane writes down of itself; the others' follow."""
EPOCH, POSITION, BUSY = 0, 4, 8
"""Offsets there: the last call that the lane has begun, the batch of words in it, and whether it is in it still."""
HEAD = PAGE
LEAST_SLOTS = 3
"""One is written and one read at once, and words are enqueued one chunk late."""


def place(lane: int, what: int) -> int:
    """Offset in a region of what lane ``lane`` writes down."""
    return LANES + lane * LINE + what


def up(nbytes: int, to: int) -> int:
    """``nbytes``, rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes within the region of one rank of ``tp``."""

    tp: int
    slot_bytes: int = 2 * MIB
    slots: int = 4

    def __post_init__(self) -> None:
        """Raises UserError: a ring that :mod:`comm.host_program` cannot use."""
        if self.slots < LEAST_SLOTS:
            raise UserError(f"a link needs at least {LEAST_SLOTS} slots, {self.slots} were given")

    @property
    def slot_pitch(self) -> int:
        """Bytes from one slot to the next."""
        return up(self.slot_bytes, PAGE)

    @property
    def data(self) -> int:
        """Where the slots begin."""
        return HEAD + up(self.slots * self.tp * LINE, PAGE)

    @property
    def region_bytes(self) -> int:
        """Size of a rank's region."""
        return self.data + self.slots * self.slot_pitch

    @property
    def total_bytes(self) -> int:
        """Shared memory of all ranks of the group."""
        return self.tp * self.region_bytes

    def slot(self, use: int) -> int:
        """The slot of the ``use``-th chunk of a call."""
        return self.data + use % self.slots * self.slot_pitch

    def word(self, use: int, reader: int) -> int:
        """The word of that slot for rank ``reader``."""
        return HEAD + (use % self.slots * self.tp + reader) * LINE

    def own_words(self) -> range:
        """Offsets of all words of a region."""
        return range(HEAD, HEAD + self.slots * self.tp * LINE, LINE)

    def words_of(self, reader: int) -> list[int]:
        """Offsets of the words that rank ``reader`` waits for and empties."""
        return [self.word(use, reader) for use in range(self.slots)]


def usual(tp: int) -> Layout:
    """What a group of ``tp`` ranks gets: 32 MB for two or four, half of what a container has.

    Of two GPUs slots of 4 MB are faster (results/host-link-h200x2: 2.5 ms for 101 MB, against 2.8) and halve the calls
    of the driver. Of more, smaller ones leave the processors' cache room for all; that has not been measured here.
    """
    return Layout(tp, (4 if tp == 2 else 2) * MIB)


def chunks(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """``(offset, bytes)`` that cut the bytes from ``first`` to ``last`` into as few parts of at most ``most`` bytes as
    will do, of about the same size: a short one at the end would cost as much host time as a long one.
    """
    total = last - first
    if total <= 0:
        return []
    count = -(-total // most)
    size = min(most, up(-(-total // count), 512))
    return [(at, min(size, last - at)) for at in range(first, last, size)]
