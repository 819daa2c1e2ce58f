"""Small messages between ranks of one host: each rank appends its own to a file in memory, which its peers read.

Used by :mod:`~megatron_flux.comm.agreement`, which takes the job's store where a rank has no such file. A look into a
peer's file takes a microsecond or two; a request to the store takes from 0.1 to 1 ms.

The file has no name, and is outside /dev/shm with its limit: peers open it as the owner's descriptor, below /proc. The
system frees it with the last process that has it open, however that ends.

Hazards
    * Of a message that is just being written a reader may see a part, on processors other than x86 in any order. So
      each has a checksum, over its number too: until that fits, it is not there.
    * A process id may be another process by now, and what is taken for one host may be two. So a file begins with a
      token.
    * A forked child inherits the descriptors: it must not write.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
import zlib
from collections.abc import Iterator

_HEAD = struct.Struct("=qqI")
"""A message's number, length and checksum."""
_TOKEN_BYTES = 8

Address = tuple[int, int, bytes]
"""Where processes of its host find a box: its owner's id and descriptor, and its token."""


class Box:
    """The file of a rank, which that rank alone writes."""

    def __init__(self, handle: int) -> None:
        """Take over the descriptor ``handle``."""
        self._handle = handle
        self._at = _TOKEN_BYTES  # where the next message to read begins
        weakref.finalize(self, os.close, handle).atexit = False

    @classmethod
    def create(cls) -> tuple[Box, Address]:
        """Return a box for the calling rank. Raises OSError."""
        handle, token = os.memfd_create("megatron_flux"), secrets.token_bytes(_TOKEN_BYTES)
        box = cls(handle)
        os.write(handle, token)
        return box, (os.getpid(), handle, token)

    @classmethod
    def at(cls, address: Address) -> Box:
        """Return a peer's box. Raises OSError or ValueError."""
        process, there, token = address
        box = cls(os.open(f"/proc/{process}/fd/{there}", os.O_RDONLY))
        if os.pread(box._handle, _TOKEN_BYTES, 0) != token:
            raise ValueError(f"descriptor {there} of process {process} is something else")
        return box

    def put(self, number: int, message: bytes) -> None:
        """Append a message."""
        os.write(self._handle, _HEAD.pack(number, len(message), _checksum(number, message)) + message)

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield what has been appended since the last time, as ``(number, message)``."""
        left = os.fstat(self._handle).st_size - self._at
        data = os.pread(self._handle, left, self._at) if left > 0 else b""
        while len(data) >= _HEAD.size:
            number, length, checksum = _HEAD.unpack_from(data)
            message, data = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
            if _checksum(number, message) != checksum:
                return
            self._at += _HEAD.size + length
            yield number, message


def _checksum(number: int, message: bytes) -> int:
    return zlib.crc32(message, number & 0xFFFFFFFF)
