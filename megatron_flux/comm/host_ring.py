"""Where everything lies in the shared memory of the link through host memory. Arithmetic only.

Every rank owns one region, which it alone writes data into and all ranks of the group map::

    [head: counters of the owner][words][shared slots][slots for peer 0][slots for peer 1]...

A *channel* is a ring of slots of one size. The *shared* channel of a rank is read by all its peers (an all-gather: the
rank copies its shard to host memory once); a *pair* channel by one (a reduce-scatter: what it sends differs by peer).
Each slot has a word for each of its readers: EMPTY, or FULL. The writer waits until the words of all readers are EMPTY,
copies, and makes them FULL; a reader waits until its own is FULL, copies, and makes it EMPTY. The words come back to
where they were, so everything that a call enqueues depends on nothing but the sizes of what it moves: it is laid out
once per shape.

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
"""Offset in the head of what the owner's first lane writes down of itself; the other's follows."""
EPOCH, POSITION, DONE = 0, 4, 8
"""Offsets there: the call that the lane is in, the batch of words in it, the last call that it has ended."""
HEAD = PAGE


def place(lane: int, what: int) -> int:
    """Offset in a region of what lane ``lane`` writes down."""
    return LANES + lane * LINE + what


def _up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes within the region of one rank of ``tp``."""

    tp: int
    slot_bytes: int = 2 * MIB
    shared_slots: int = 6
    pair_slots: int = 3

    def __post_init__(self) -> None:
        """Raises UserError: rings too short for what is enqueued in one order; see :mod:`comm.host_link`."""
        if min(self.shared_slots, self.pair_slots) < 3:
            raise UserError("the link through host memory needs at least 3 slots in a channel")

    @property
    def peers(self) -> int:
        """Readers of a shared channel."""
        return self.tp - 1

    @property
    def slot_pitch(self) -> int:
        """Bytes from one slot to the next."""
        return _up(self.slot_bytes, PAGE)

    @property
    def _words(self) -> int:
        return (self.shared_slots + self.pair_slots) * self.tp

    @property
    def data(self) -> int:
        """Where the slots begin."""
        return HEAD + _up(self._words * LINE, PAGE)

    @property
    def region_bytes(self) -> int:
        """Size of a rank's region."""
        return self.data + (self.shared_slots + self.peers * self.pair_slots) * self.slot_pitch

    @property
    def total_bytes(self) -> int:
        """Shared memory of all ranks of the group."""
        return self.tp * self.region_bytes

    def shared_slot(self, use: int) -> int:
        """The slot of the ``use``-th chunk of a call on the shared channel."""
        return self.data + use % self.shared_slots * self.slot_pitch

    def shared_word(self, use: int, reader: int) -> int:
        """The word of that slot for rank ``reader``."""
        return HEAD + (use % self.shared_slots * self.tp + reader) * LINE

    def pair_slot(self, owner: int, reader: int, use: int) -> int:
        """The slot of the ``use``-th chunk of a call from rank ``owner`` to rank ``reader``."""
        place = (reader - owner) % self.tp - 1
        return self.data + (self.shared_slots + place * self.pair_slots + use % self.pair_slots) * self.slot_pitch

    def pair_word(self, reader: int, use: int) -> int:
        """The word of that slot."""
        return HEAD + (self.shared_slots * self.tp + reader * self.pair_slots + use % self.pair_slots) * LINE

    def own_words(self) -> range:
        """Offsets of all words of a region."""
        return range(HEAD, HEAD + self._words * LINE, LINE)

    def words_of(self, reader: int) -> list[int]:
        """Offsets of the words that rank ``reader`` waits for and empties."""
        shared = [self.shared_word(use, reader) for use in range(self.shared_slots)]
        return shared + [self.pair_word(reader, use) for use in range(self.pair_slots)]


def chunks(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """``(offset, bytes)`` that cut the bytes from ``first`` to ``last`` into as few parts of at most ``most`` bytes as
    will do, of about the same size: a short one at the end would cost as much host time as a long one.
    """
    total = last - first
    if total <= 0:
        return []
    count = -(-total // most)
    size = min(most, _up(-(-total // count), 512))
    return [(at, min(size, last - at)) for at in range(first, last, size)]
