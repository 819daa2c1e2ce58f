"""The calls of CUDA's driver that operators make, through ctypes: a copy costs a fifth of the host time of ``copy_``.

What the callers pass are addresses and handles that torch and Triton made; nothing here allocates on the device.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from megatron_flux.errors import OperatorError

MAP_BYTES = 128
"""Size of a ``CUtensorMap``."""

_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""``CUtensorMapDataType``."""
_L2_PROMOTION_128B = 2
_INVALID_CONTEXT = 201
_ANYWHERE = 4
"""``CU_MEMORYTYPE_UNIFIED``."""
_CAPTURING = 1
"""``CU_STREAM_CAPTURE_STATUS_ACTIVE``."""


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        OSError: there is none.
    """
    lib = ctypes.CDLL("libcuda.so.1")
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint
    lib.cuLaunchKernel.argtypes = [pointer, *[u32] * 7, pointer, pointer, pointer]
    lib.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer]
    lib.cuMemcpy2DAsync_v2.argtypes = [pointer, pointer]
    lib.cuEventRecord.argtypes = [pointer, pointer]
    lib.cuStreamWaitEvent.argtypes = [pointer, pointer, u32]
    lib.cuStreamGetCaptureInfo.argtypes = [pointer, pointer, pointer]
    lib.cuTensorMapEncodeTiled.argtypes = [
        pointer, ctypes.c_int, u32, pointer, pointer, pointer, pointer, pointer, *[ctypes.c_int] * 4,
    ]  # fmt: skip
    lib.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return lib


@functools.cache
def available() -> bool:
    """Whether this machine has CUDA's driver."""
    try:
        _driver()
    except OSError:
        return False
    return True


def launch(function: int, grid: int, threads: int, shared: int, stream: int, parameters: ctypes.Array) -> None:
    """Launch ``grid`` CTAs of ``threads`` threads with ``shared`` bytes of dynamic shared memory.

    ``parameters`` is an array of the parameters' addresses; their values are copied before this returns.

    Raises:
        OperatorError: CUDA refused it.
    """
    status = _driver().cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, None)
    if status == _INVALID_CONTEXT:  # the first CUDA call of this thread: the runtime makes its context current
        torch.cuda.set_device(torch.cuda.current_device())
        torch.cuda.current_stream().query()
        status = _driver().cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, None)
    if status:
        raise OperatorError(f"CUDA refused a launch of {grid} x {threads} threads: {_words(status)}")


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy ``nbytes`` between addresses that this device can reach, by copy engine, in the order of ``stream``.

    Raises:
        OperatorError: CUDA refused it.
    """
    status = _driver().cuMemcpyDtoDAsync_v2(target, source, nbytes, stream)
    if status:
        raise OperatorError(f"CUDA refused a copy of {nbytes} bytes between GPUs: {_words(status)}")


_COPY_SIDE = (
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
)


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of cuda.h, for device addresses."""

    _fields_ = (
        *((f"src_{name}", kind) for name, kind in _COPY_SIDE),
        *((f"dst_{name}", kind) for name, kind in _COPY_SIDE),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_rows(target: int, source: int, width: int, rows: int, pitch: int, stream: int) -> None:
    """As :func:`copy`, of ``rows`` of ``width`` bytes that begin ``pitch`` bytes apart on both sides.

    Raises:
        OperatorError: CUDA refused it.
    """
    wanted = _Copy2D(
        src_type=_ANYWHERE, src_device=source, src_pitch=pitch,
        dst_type=_ANYWHERE, dst_device=target, dst_pitch=pitch,
        width=width, height=rows,
    )  # fmt: skip
    status = _driver().cuMemcpy2DAsync_v2(ctypes.byref(wanted), stream)
    if status:
        raise OperatorError(f"CUDA refused a copy of {rows} x {width} bytes between GPUs: {_words(status)}")


def record(event: int, stream: int) -> None:
    """Record ``event`` in the order of ``stream``.

    Raises:
        OperatorError: CUDA refused it.
    """
    status = _driver().cuEventRecord(event, stream)
    if status:
        raise OperatorError(f"CUDA refused to record an event: {_words(status)}")


def wait(stream: int, event: int) -> None:
    """Make ``stream`` wait for what ``event`` was last recorded behind.

    Raises:
        OperatorError: CUDA refused it.
    """
    status = _driver().cuStreamWaitEvent(stream, event, 0)
    if status:
        raise OperatorError(f"CUDA refused to put a stream behind an event: {_words(status)}")


def capture_id(stream: int) -> int:
    """The number, unique in this process, of the capture that ``stream`` is part of.

    Raises:
        OperatorError: it is part of none, or CUDA refused to say.
    """
    state, number = ctypes.c_int(), ctypes.c_uint64()
    status = _driver().cuStreamGetCaptureInfo(stream, ctypes.byref(state), ctypes.byref(number))
    if status:
        raise OperatorError(f"CUDA refused to name the capture of a stream: {_words(status)}")
    if state.value != _CAPTURING:
        raise OperatorError(
            "a stream is not being captured any more: an earlier call, on any of its streams, is not allowed in a CUDA "
            "graph and has ended the capture"
        )
    return number.value


def tensor_map(
    address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
) -> ctypes.Array:
    """A ``CUtensorMap`` for TMA's tiled copies, as Triton makes them: out of bounds is zero.

    Args:
        address: of the first element on the device, a multiple of 16.
        dtype: bf16, fp16 or fp32.
        shape: elements of each dimension, the contiguous one last.
        strides: elements between neighbours of each dimension; the last is 1.
        box: elements of a copy in each dimension.
        swizzle: ``CUtensorMapSwizzle``.

    Raises:
        OperatorError: CUDA refused it.
    """
    rank = len(shape)
    numbers, words = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    held = (ctypes.c_char * (2 * MAP_BYTES))()
    at = -ctypes.addressof(held) % 64  # CUDA wants 64-byte alignment
    made = (ctypes.c_char * MAP_BYTES).from_buffer(held, at)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.addressof(made),
        _MAP_TYPES[dtype],
        rank,
        address,
        numbers(*reversed(shape)),
        numbers(*[stride * dtype.itemsize for stride in reversed(strides[:-1])]),
        words(*reversed(box)),
        words(*[1] * rank),
        0,  # not interleaved
        swizzle,
        _L2_PROMOTION_128B,
        0,
    )
    if status:
        raise OperatorError(f"CUDA refused a tensor map of {list(shape)} by {list(box)}: {_words(status)}")
    return made


def _words(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'unknown error'} ({status})"
