"""CUDA driver calls through ctypes: a copy costs a fifth of the host time of ``copy_``.

Callers pass addresses and handles that torch and Triton made; nothing here allocates on the device. A call that CUDA
refuses raises :class:`OperatorError` with CUDA's message.

Streams also wait for words in host memory, and write them. Such a *memory operation* waits until a 32-bit word has a
value, or writes one, in the order of a stream and by the GPU's front end: no SM, no kernel. A write comes after
everything that the stream was given before it has reached memory. Many of them go to the driver in one call, whose
arguments are laid out once (:func:`table`, :func:`call_of`). Source: cuda.h of CUDA 12 and 13
(``CUstreamBatchMemOpParams``); a driver for CUDA 12 or newer is needed, older ones have these calls switched off.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_flux.errors import OperatorError

MAP_BYTES = 128  # size of a ``CUtensorMap``
_Map, _MapMemory = ctypes.c_char * MAP_BYTES, ctypes.c_char * (2 * MAP_BYTES)

_MAP_TYPES = {  # ``CUtensorMapDataType``; FP8 is bytes
    torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9,
}  # fmt: skip
_L2_PROMOTION_128B = 2
INVALID_CONTEXT = 201
_ANYWHERE = 4  # ``CU_MEMORYTYPE_UNIFIED``
_DYNAMIC_SHARED_BYTES = 8  # ``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``
_CAPTURING = 1  # ``CU_STREAM_CAPTURE_STATUS_ACTIVE``
_PORTABLE_AND_MAPPED = 1 | 2  # ``CU_MEMHOSTREGISTER_PORTABLE``, ``CU_MEMHOSTREGISTER_DEVICEMAP``

_P, _I, _U32, _U64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
_ARGUMENTS: dict[str, list[Any]] = {
    "cuLaunchKernel": [_P, *[_U32] * 7, _P, _P, _P],
    "cuModuleLoadData": [_P, ctypes.c_char_p],
    "cuModuleGetFunction": [_P, _P, ctypes.c_char_p],
    "cuFuncSetAttribute": [_P, _I, _I],
    "cuMemcpyDtoDAsync_v2": [_U64, _U64, _SIZE, _P],
    "cuMemcpy2DAsync_v2": [_P, _P],
    "cuMemcpyAsync": [_U64, _U64, _SIZE, _P],
    "cuMemHostRegister_v2": [_P, _SIZE, _U32],
    "cuMemHostUnregister": [_P],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_U64), _P, _U32],
    "cuEventRecord": [_P, _P],
    "cuStreamWaitEvent": [_P, _P, _U32],
    "cuStreamBatchMemOp_v2": [_P, _U32, _P, _U32],
    "cuStreamGetCaptureInfo": [_P, _P, _P],
    "cuTensorMapEncodeTiled": [_P, _I, _U32, _P, _P, _P, _P, _P, _I, _I, _I, _I],
    "cuDeviceGet": [ctypes.POINTER(_I), _I],
    "cuDeviceGetAttribute": [ctypes.POINTER(_I), _I, _I],
    "cuGetErrorString": [_I, ctypes.POINTER(ctypes.c_char_p)],
}


@functools.cache
def library() -> ctypes.CDLL:
    """Load the driver's library. Raises OSError: there is none; AttributeError: it is older than CUDA 12."""
    lib = ctypes.CDLL("libcuda.so.1")
    for name, types in _ARGUMENTS.items():
        getattr(lib, name).argtypes = types
    return lib


@functools.cache
def available() -> bool:
    """Return True if this machine has CUDA's driver."""
    try:
        library()
    except OSError:
        return False
    return True


def refused(what: str, status: int) -> OperatorError:
    """Return the error of a call that returned ``status``; ``what`` it should have done."""
    text = ctypes.c_char_p()
    library().cuGetErrorString(status, ctypes.byref(text))
    return OperatorError(f"CUDA refused {what}: {text.value.decode() if text.value else 'unknown error'} ({status})")


def again(status: int, what: str, function: Callable[..., int], *arguments: Any) -> None:
    """Make a call that returned ``status`` once more if this thread had no context yet.

    Raises OperatorError: CUDA refused ``what`` it should have done.
    """
    if status == INVALID_CONTEXT:
        make_context_current()
        status = function(*arguments)
    if status:
        raise refused(what, status)


def _call(what: str, name: str, *arguments: Any) -> None:
    """Call the driver's function ``name``, where host time does not matter. Raises OperatorError as :func:`again`."""
    function = getattr(library(), name)
    if status := function(*arguments):
        again(status, what, function, *arguments)


def attribute(device: torch.device, number: int) -> int:
    """Return an attribute of a GPU; ``number``: a ``CUdevice_attribute``."""
    index = torch.cuda.current_device() if device.index is None else device.index
    gpu, value, what = _I(), _I(), f"attribute {number} of GPU {index}"
    _call(what, "cuDeviceGet", ctypes.byref(gpu), index)
    _call(what, "cuDeviceGetAttribute", ctypes.byref(value), number, gpu.value)
    return value.value


def launch(function: int, grid: int, threads: int, shared: int, stream: int, parameters: ctypes.Array) -> None:
    """Launch ``grid`` CTAs of ``threads`` threads with ``shared`` bytes of dynamic shared memory.

    ``parameters`` is an array of the parameters' addresses; their values are copied before this returns.
    """
    arguments = function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, None
    if status := library().cuLaunchKernel(*arguments):
        again(status, f"a launch of {grid} x {threads} threads", library().cuLaunchKernel, *arguments)


def load(image: bytes, name: str, shared: int) -> int:
    """Load the kernel ``name`` of a cubin for good, with ``shared`` bytes of dynamic shared memory, and return it."""
    module, function = _P(), _P()
    what = f"to load {name}, which needs {shared} bytes of shared memory"
    _call(what, "cuModuleLoadData", ctypes.byref(module), image)
    _call(what, "cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    _call(what, "cuFuncSetAttribute", function, _DYNAMIC_SHARED_BYTES, shared)
    return function.value or 0


def make_context_current() -> None:
    """Do what the runtime does in a thread's first CUDA call."""
    torch.cuda.set_device(torch.cuda.current_device())
    torch.cuda.current_stream().query()


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy ``nbytes`` between addresses that this device can reach, by copy engine, in the order of ``stream``."""
    status = library().cuMemcpyDtoDAsync_v2(target, source, nbytes, stream)
    if status:
        raise refused(f"a copy of {nbytes} bytes between GPUs", status)


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of cuda.h, for device addresses."""

    _fields_ = (
        *((f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in (
            ("x", _SIZE), ("y", _SIZE), ("type", _I), ("host", _P), ("device", _U64), ("array", _P), ("pitch", _SIZE),
        )),
        ("width", _SIZE),
        ("height", _SIZE),
    )  # fmt: skip


def copy_rows(target: int, source: int, width: int, rows: int, pitch: int, stream: int) -> None:
    """Copy ``rows`` of ``width`` bytes that begin ``pitch`` bytes apart on both sides; else like :func:`copy`."""
    arguments = _Copy2D(
        src_type=_ANYWHERE, src_device=source, src_pitch=pitch,
        dst_type=_ANYWHERE, dst_device=target, dst_pitch=pitch,
        width=width, height=rows,
    )  # fmt: skip
    status = library().cuMemcpy2DAsync_v2(ctypes.byref(arguments), stream)
    if status:
        raise refused(f"a copy of {rows} x {width} bytes between GPUs", status)


def record(event: int, stream: int) -> None:
    """Record ``event`` in the order of ``stream``."""
    if status := library().cuEventRecord(event, stream):
        again(status, "to record an event", library().cuEventRecord, event, stream)


def wait(stream: int, event: int) -> None:
    """Make ``stream`` wait for ``event``."""
    if status := library().cuStreamWaitEvent(stream, event, 0):
        again(status, "to put a stream behind an event", library().cuStreamWaitEvent, stream, event, 0)


def capture_id(stream: int) -> int:
    """Return the number, unique in this process, of the capture that ``stream`` is part of. Raises OperatorError if it
    is in none.
    """
    state, number = _I(), _U64()
    _call(
        "to name the capture of a stream", "cuStreamGetCaptureInfo", stream, ctypes.byref(state), ctypes.byref(number)
    )
    if state.value != _CAPTURING:
        raise OperatorError(
            "a stream is not being captured any more: an earlier call, on any of its streams, is not allowed in a CUDA "
            "graph and has ended the capture"
        )
    return number.value


def tensor_maps(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> Callable[[int], ctypes.Array]:
    """Return what makes a ``CUtensorMap`` of an address for TMA's tiled copies like Triton's: out of bounds is zero.

    The address is the first element's on the device, a multiple of 16; ``dtype`` bf16, fp16, fp32 or FP8.
    ``shape``, ``strides`` (the last is 1) and ``box`` (of a copy) are in elements, the contiguous dimension last.
    ``swizzle`` is a ``CUtensorMapSwizzle``.
    """
    rank = len(shape)
    numbers, words = _U64 * rank, ctypes.c_uint32 * rank
    sizes, steps = numbers(*reversed(shape)), numbers(*[stride * dtype.itemsize for stride in reversed(strides[:-1])])
    boxes, ones = words(*reversed(box)), words(*[1] * rank)
    kind, encode = _MAP_TYPES[dtype], library().cuTensorMapEncodeTiled

    def made(address: int) -> ctypes.Array:
        memory = _MapMemory()
        tensor_map = _Map.from_buffer(memory, -ctypes.addressof(memory) % 64)  # CUDA wants 64-byte alignment
        # Not interleaved, and zeros out of bounds.
        to = ctypes.addressof(tensor_map)
        if status := encode(to, kind, rank, address, sizes, steps, boxes, ones, 0, swizzle, _L2_PROMOTION_128B, 0):
            raise refused(f"a tensor map of {list(shape)} by {list(box)}", status)
        return tensor_map

    return made


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


def run(calls: Iterable[Call], rows: Sequence[int]) -> None:
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
    device_address = _U64()
    _call(f"to pin {nbytes} bytes of shared memory", "cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
    what = "a device address of pinned memory"
    _call(what, "cuMemHostGetDevicePointer_v2", ctypes.byref(device_address), address, 0)
    return device_address.value


def unregister(address: int) -> None:
    """Undo :func:`register`; nothing may be under way to that memory."""
    _call("to unpin shared memory", "cuMemHostUnregister", address)
