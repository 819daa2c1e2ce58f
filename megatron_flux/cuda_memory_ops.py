"""CUDA driver calls for words in host memory that streams wait for and write, for copies and pinning, through ctypes.

A *memory operation* waits until a 32-bit word has a value, or writes one, in the order of a stream and by the GPU's
front end: no SM, no kernel. A write comes after everything that the stream was given before it has reached memory. Many
of them go to the driver in one call, whose arguments are laid out once (:func:`table`, :func:`call_of`).

A call that CUDA refuses raises :class:`~megatron_flux.errors.OperatorError`. Source: cuda.h of CUDA 12 and 13
(``CUstreamBatchMemOpParams``); a driver for CUDA 12 or newer is needed, older ones have these calls switched off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_flux.cuda_driver import again, library, refused

_P, _U32, _U64, _SIZE = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
_PORTABLE_AND_MAPPED = 1 | 2
"""``CU_MEMHOSTREGISTER_PORTABLE``, ``CU_MEMHOSTREGISTER_DEVICEMAP``."""

WAIT, WRITE, FLUSH = 1, 2, 3
"""``CU_STREAM_MEM_OP_WAIT_VALUE_32``, ``..._WRITE_VALUE_32``, ``..._FLUSH_REMOTE_WRITES`` (no address, no value)."""
EQUAL = 1
"""``CU_STREAM_WAIT_VALUE_EQ``; of a write 0 is the default, with a memory barrier before it."""
BYTES = 48
"""Size of a ``CUstreamBatchMemOpParams``."""
VALUE = 2
"""The column of a :func:`table` that holds the values."""
MOST = 255
"""Memory operations of one call of the driver."""


class WordOp(NamedTuple):
    """One memory operation."""

    kind: int  # WAIT (until the word equals ``value``), WRITE or FLUSH
    address: int
    value: int


def table(operations: Sequence[WordOp]) -> np.ndarray:
    """Lay memory operations out for the driver, one a row: a ``uint64`` array ``[count, 6]``. Its column :data:`VALUE`
    may be written before each use: the driver reads it when it is called.
    """
    if len(operations) > MOST:
        raise ValueError(f"{len(operations)} memory operations for one call of the driver, which takes {MOST}")
    # operation at 0, address at 8, value (a union of 8 bytes) at 16, flags at 24, alias at 32 of 48 bytes.
    rows = [(kind, address, value, EQUAL if kind == WAIT else 0, 0, 0) for kind, address, value in operations]
    return np.array(rows, dtype=np.uint64).reshape(len(rows), BYTES // 8)


class Copy(NamedTuple):
    """A copy between the device and a slot of host memory, or of another GPU."""

    row: int  # of addresses on the device that :func:`run` is given
    offset: int  # from there
    slot: int  # address
    nbytes: int


Call = tuple[Any, tuple[Any, ...], bool, list[tuple[Any, ...]]]
"""A function that returns a status of the driver, its arguments, and copies behind it (from slots, or to them)."""


def call_of(operations: np.ndarray, stream: int, copies: Sequence[Copy] = (), *, from_slots: bool = False) -> Call:
    """Lay out what enqueues the memory operations of a :func:`table`, which it keeps, in ``stream`` (a handle), and the
    ``copies`` behind them.
    """
    at, first = _P(stream), operations.ctypes.data_as(_P)
    laid_out = [(row, offset, _U64(slot), _SIZE(nbytes), at) for row, offset, slot, nbytes in copies]
    return library().cuStreamBatchMemOp_v2, (at, _U32(len(operations)), first, _U32(0)), from_slots, laid_out


def record_of(event: int, stream: int) -> Call:
    """Lay out what records ``event`` in the order of ``stream``."""
    return library().cuEventRecord, (_P(event), _P(stream)), False, []  # a number would be converted in each call


def wait_of(stream: int, event: int, *, external: bool = False) -> Call:
    """Lay out what puts ``stream`` behind ``event``. ``external``: each launch of the CUDA graph that has it
    waits for what the event has recorded last.
    """
    return library().cuStreamWaitEvent, (_P(stream), _P(event), _U32(external)), False, []  # CU_EVENT_WAIT_EXTERNAL


def run(calls: Sequence[Call], rows: Sequence[int]) -> None:
    """Enqueue ``calls``. Beside the driver this loop is most of a transfer's host time."""
    copy = library().cuMemcpyAsync
    for function, arguments, from_slots, copies in calls:
        if status := function(*arguments):
            words = function == library().cuStreamBatchMemOp_v2
            what = f"{arguments[1].value} memory operations in a stream" if words else "an event"
            again(status, what, function, *arguments)
        for row, offset, slot, nbytes, stream in copies:
            at = rows[row] + offset
            if status := copy(at, slot, nbytes, stream) if from_slots else copy(slot, at, nbytes, stream):
                raise refused(f"a copy of {nbytes.value} bytes between host and GPU", status)


def register(address: int, nbytes: int) -> int:
    """Pin ``nbytes`` of this process at ``address`` (both multiples of a page) and return the device's address."""
    status = library().cuMemHostRegister_v2(address, nbytes, _PORTABLE_AND_MAPPED)
    if status:
        raise refused(f"to pin {nbytes} bytes of shared memory", status)
    device_address = _U64()
    status = library().cuMemHostGetDevicePointer_v2(ctypes.byref(device_address), address, 0)
    if status:
        raise refused("a device address of pinned memory", status)
    return device_address.value


def unregister(address: int) -> None:
    """Undo :func:`register`; nothing may be under way to that memory."""
    status = library().cuMemHostUnregister(address)
    if status:
        raise refused("to unpin shared memory", status)
