"""Small messages between ranks of one host, through memory that they share: a box for each rank, which it alone writes.

Used by :mod:`~megatron_flux.comm.agreement`, which takes the job's store where a rank has no box. A look into a peer's
box takes a microsecond; a request to the store takes from 0.1 to 1 ms.

Contract
    * Messages are numbered. Number n lies in slot n % :data:`SLOTS`, from :meth:`OwnBox.put` to :meth:`OwnBox.free`. A
      slot is not written again before: :meth:`OwnBox.put` returns False, as for a message that does not fit.
    * A box says the number of its rank's newest message, wherever that is: no other place holds a later one.
    * The file has no name, and is outside /dev/shm with its limit: peers open it as the owner's descriptor, below
      /proc. The system frees it with the last process that maps it, however that ends. A rank holds a descriptor for
      each box, and one more.

Hazards
    * A processor other than x86 may show a peer's words in another order than they were written in. So a message has a
      checksum, over its number too: until that fits, it is not there.
    * A process id may be another process by now, and what is taken for one host may be two. So a box has a token.
    * A forked child inherits the memory: it must not write, and keeps it as long as it lives.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
import zlib

SLOTS, SLOT_BYTES = 32, 4096
_PAGE = 4096
BYTES = _PAGE + SLOTS * SLOT_BYTES
"""Of one rank."""
_NEWEST, _LOOKS, _TOKEN = range(3)
"""Words of the first page."""
_WORD = 8
_HEAD = 2 * _WORD  # of a slot: its message's number; length and checksum

Address = tuple[int, int, int]
"""Where processes of its host find a box: its owner's id and descriptor, and its token."""


class Box:
    """A rank's box, as its peers see it."""

    def __init__(self, handle: int) -> None:
        """Map the file. Raises OSError or ValueError."""
        self._memory = memoryview(mmap.mmap(handle, BYTES))
        self._words = self._memory.cast("Q")

    @classmethod
    def at(cls, address: Address) -> Box:
        """Return a peer's box. Raises OSError or ValueError."""
        process, there, token = address
        handle = os.open(f"/proc/{process}/fd/{there}", os.O_RDWR)
        try:
            box = cls(handle)
        finally:
            os.close(handle)
        if box._words[_TOKEN] != token:
            raise ValueError(f"descriptor {there} of process {process} is something else")
        return box

    @property
    def newest(self) -> int:
        """Number of the rank's newest message."""
        return self._words[_NEWEST]

    @property
    def looks(self) -> bool:
        """The rank looks into all boxes."""
        return bool(self._words[_LOOKS])

    def get(self, number: int) -> bytes | None:
        """Return the message, None if it is not here."""
        at = _PAGE + number % SLOTS * SLOT_BYTES
        if self._words[at // _WORD] != number:
            return None
        length, checksum = divmod(self._words[at // _WORD + 1], 1 << 32)
        message = bytes(self._memory[at + _HEAD : at + _HEAD + length])
        return message if _checksum(number, message) == checksum else None


class OwnBox(Box):
    """The calling rank's box."""

    def __init__(self) -> None:
        """Make it. Raises OSError or ValueError."""
        handle = os.memfd_create("megatron_flux")
        weakref.finalize(self, os.close, handle).atexit = False
        os.posix_fallocate(handle, 0, BYTES)
        super().__init__(handle)
        self._words[_TOKEN] = secrets.randbits(63)
        self.address: Address = os.getpid(), handle, self._words[_TOKEN]
        self._held: dict[int, int] = {}
        """Numbers by slot."""

    def look(self) -> None:
        """Say that this rank looks into all boxes."""
        self._words[_LOOKS] = 1

    def put(self, number: int, message: bytes) -> bool:
        """Write a message; return False if it does not fit or its slot is not free."""
        if len(message) > SLOT_BYTES - _HEAD or number % SLOTS in self._held:
            return False
        self._held[number % SLOTS] = number
        at = _PAGE + number % SLOTS * SLOT_BYTES
        self._memory[at + _HEAD : at + _HEAD + len(message)] = message
        self._words[at // _WORD + 1] = len(message) << 32 | _checksum(number, message)
        self._words[at // _WORD] = number
        return True

    def announce(self, number: int) -> None:
        """Say that this message is there, here or elsewhere."""
        self._words[_NEWEST] = number

    def free(self, number: int) -> bool:
        """Let the slot be written again, which all peers have read; return False if the message was not here."""
        if self._held.get(number % SLOTS) != number:
            return False
        del self._held[number % SLOTS]
        return True


def _checksum(number: int, message: bytes) -> int:
    return zlib.crc32(message, number & 0xFFFFFFFF)


def make() -> OwnBox | None:
    """Return a box for this rank, None where it can have none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no memory; no Linux
        return OwnBox()
    return None


def find(addresses: list[Address]) -> list[Box]:
    """Return the boxes of peers on this host; none if one of them cannot be mapped."""
    with contextlib.suppress(OSError, ValueError):
        return [Box.at(address) for address in addresses]
    return []
