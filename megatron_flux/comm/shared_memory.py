"""Memory that ranks of a group share: on their GPUs (:func:`allocate`), or on their host, pinned where there is a GPU
(:func:`make_regions`). The one allocator for both.

Contract
    * All are collective. Each step succeeds on all ranks, or raises SharedMemoryError on all of them with advice: no
      peer waits for a rank that had no memory (:func:`obtain`). The memory is zero.
    * A rank without memory first gives back what torch has cached and tries again: symmetric and pinned memory do not
      come from torch's own allocator, which would do that by itself.
    * A region is allocated before it is used (``posix_fallocate``): too little shared memory is an error here, not a
      SIGBUS in the middle of a training. Containers have 64 MB unless they are told otherwise.
    * A region's pages lie on the NUMA node of its owner's GPU.
    * Files have no name any more when a function returns, whatever its end: the system frees the memory with the last
      process that maps it, however that ends. Every rank removes all names it knows, not its own alone.

Hazard: a GPU may be writing into a region whose last owner is dropped. So a region that CUDA has pinned is not freed
when it is dropped but at the next :func:`make_regions`, which waits for the device first.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_flux import cuda_driver, nvml
from megatron_flux.comm.agreement import TogetherError, together
from megatron_flux.errors import OperatorError, SharedMemoryError, UserError, one_line

_Result = TypeVar("_Result")

FOLDER = Path("/dev/shm")  # noqa: S108 - mkstemp makes the files, private to us
_MIB = 1 << 20


def obtain(
    group: dist.ProcessGroup, about: str, work: Callable[[], _Result], advice: Callable[[bool], str]
) -> list[_Result]:
    """Return the result of ``work()`` on every rank; collective. Raises SharedMemoryError on all ranks if it raised on
    one, with ``advice(full)``; ``full``: there was too little memory.
    """

    def twice() -> _Result:
        try:
            return work()
        except (RuntimeError, OSError) as error:
            if not _is_full(one_line(error)):
                raise
        gc.collect()
        torch.cuda.empty_cache()
        return work()

    try:
        return together(group, about, twice)
    except TogetherError as error:
        raise SharedMemoryError(f"{error}: {advice(_is_full(str(error)))}") from error


def _is_full(message: str) -> bool:
    """Return True if an error's message speaks of too little memory; torch and the driver have no type for it."""
    message = message.lower().replace("_", " ")
    return any(part in message for part in ("out of memory", "no space left", "cannot allocate memory"))


def allocate(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """Return uint8 ``[nbytes]`` of every rank, and what keeps it mapped; for CPUs, in tests, host memory."""
    if device.type == "cuda":
        return symmetric(group, nbytes, device)
    return host_tensors(group, nbytes), None


def symmetric(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """Allocate torch's symmetric memory; see :func:`allocate`."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symm_mem

    keep: list[Any] = []
    tensors: list[torch.Tensor] = []

    def allocate() -> None:
        keep.append(symm_mem.empty(nbytes, dtype=torch.uint8, device=device))

    def map_all() -> None:
        handle = symm_mem.rendezvous(keep[0], group)
        if handle.multicast_ptr:
            raise OperatorError(
                "torch made an NVLink multicast object; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before "
                "torch.distributed is imported"
            )
        keep.append(handle)
        tensors.extend(handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(group.size()))

    def advice(full: bool) -> str:
        if full:
            return (
                "leave more of the GPU's memory free, or train with less of it: a smaller micro-batch, a shorter "
                "sequence, recomputation"
            )
        return (
            "do all ranks see each other's GPUs, in containers too, and does NVIDIA's fabric manager run where there "
            "is NVSwitch? MEGATRON_FLUX_LINK=none does without"
        )

    about = f"sharing {nbytes >> 20} MiB of GPU memory among ranks {dist.get_process_group_ranks(group)}"
    obtain(group, about, allocate, advice)
    obtain(group, f"{about} (mapping)", map_all, advice)
    return tensors, keep


_dropped: list[list[np.ndarray]] = []
"""Pinned memory whose owners are gone."""
_in_graphs: list[list[np.ndarray]] = []


class Regions:
    """The regions of a group, by rank."""

    def __init__(self, views: list[np.ndarray], pinned: list[int]) -> None:
        """``views``: this process's of the memory; ``pinned``: the device's addresses, if CUDA has pinned it."""
        self._views = views
        self.host = [view.ctypes.data for view in views]
        """Addresses for this process."""
        self.lanes = pinned or self.host
        """Addresses for :mod:`~megatron_flux.comm.lanes`."""
        self._finalizer = weakref.finalize(self, _dropped.append, views) if pinned else None
        if self._finalizer is not None:
            self._finalizer.atexit = False

    def never_free(self) -> None:
        """Keep the memory for good: a CUDA graph holds the addresses."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            _in_graphs.append(self._views)


def make_regions(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Regions:
    """Return a region of ``nbytes`` (a multiple of a page) for each rank."""
    if _dropped and device.type == "cuda":
        torch.cuda.synchronize(device)
        while _dropped:
            _unpin(_dropped.pop())
    return Regions(*_map_files(group, nbytes, lambda: _make_file(nbytes, device), pin=device.type == "cuda"))


def host_tensors(group: dist.ProcessGroup, nbytes: int) -> list[torch.Tensor]:
    """Return uint8 ``[nbytes]`` for each rank, of which the system allocates what is touched."""
    views, _ = _map_files(group, nbytes, lambda: _make_file(nbytes), pin=False)
    return [torch.from_numpy(view) for view in views]


def _map_files(
    group: dist.ProcessGroup, nbytes: int, allocate: Callable[[], str], *, pin: bool
) -> tuple[list[np.ndarray], list[int]]:
    """Map every rank's file, which ``allocate`` makes; return its views and, with ``pin``, device addresses."""
    names: list[str] = []
    views: list[np.ndarray] = []
    pinned: list[int] = []

    def make_own() -> tuple[str, str]:
        names.append(allocate())
        return socket.gethostname(), names[0]

    def map_all() -> None:
        for name in names[len(views) :]:
            views.append(np.memmap(name, np.uint8, "r+", shape=(nbytes,)))
        for view in views[len(pinned) :] if pin else ():
            pinned.append(cuda_driver.register(view.ctypes.data, nbytes))

    def advice(_: bool) -> str:
        needed, total = -(-nbytes * group.size() // _MIB), host_room()[0]
        return (
            f"{group.size()} ranks need {needed} MiB, and {FOLDER} has {total // _MIB} in all; give the container more "
            f"shared memory (docker run --shm-size={needed + 64}m, or --ipc=host)"
        )

    about = f"sharing {-(-nbytes // _MIB)} MiB of {FOLDER}"
    try:
        hosts, names[:] = zip(*obtain(group, about, make_own, advice), strict=True)
        if len(set(hosts)) > 1:
            raise UserError("shared host memory needs all ranks of a group on one host")
        obtain(group, f"{about} (mapping)", map_all, advice)
    except BaseException:
        _unpin(views[: len(pinned)])
        raise
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return views, pinned


def _unpin(views: list[np.ndarray]) -> None:
    for view in views:
        cuda_driver.unregister(view.ctypes.data)


def host_room() -> tuple[int, int]:
    """Return the bytes of shared memory of this process's system, and those left; zeros where it has none."""
    if not FOLDER.is_dir():
        return 0, 0
    disk = os.statvfs(FOLDER)
    return disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize


def _make_file(nbytes: int, device: torch.device | None = None) -> str:
    """Make a file, with a ``device`` with memory near it, and return its name. Raises OSError."""
    prefix = "megatron_flux_" if device is None else "megatron_flux_host_"
    handle, name = tempfile.mkstemp(prefix=prefix, dir=FOLDER)
    try:
        if device is None:
            os.ftruncate(handle, nbytes)
        else:
            # What a thread allocates lies on the NUMA node that it runs on: that of the GPU, where it may run there.
            allowed = os.sched_getaffinity(0)
            if near := allowed & nvml.processors(device):
                os.sched_setaffinity(0, near)
            try:
                os.posix_fallocate(handle, 0, nbytes)
            finally:
                if near:
                    os.sched_setaffinity(0, allowed)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(handle)
    return name
