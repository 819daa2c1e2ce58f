"""Shared memory of a group's ranks on one host: a region for each, mapped by all.

Contract
    * :func:`make` is collective. It ends on all ranks with the regions, or on all of them with one UserError that says
      what is needed: how much memory, one host. The memory is zero.
    * A region is allocated before it is used (``posix_fallocate``): too little of it is an error here, and not a SIGBUS
      in the middle of a training. Containers have 64 MB unless they are told otherwise.
    * Its pages lie on the NUMA node of the owner's GPU.
    * The files have no name any more when :func:`make` returns, whatever its end: the system frees the memory with the
      last process that maps it, however that ends. Every rank removes all names it knows, not its own alone.

Hazard: a GPU may be writing into a region whose last owner is dropped. So a region that CUDA has pinned is not freed
when it is dropped but at the next :func:`make`, which waits for the device first.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_flux import cuda_memory_ops as memory_ops
from megatron_flux import nvml
from megatron_flux.comm import shared_memory
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.errors import SharedMemoryError, UserError

FOLDER = Path("/dev/shm")  # noqa: S108 - mkstemp makes the files, private to us
_MIB = 1 << 20


class Mapping:
    """One file in this process's memory."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Raises OSError."""
        handle = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        self._view = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self._view.ctypes.data
        self.lane = self.address
        """The address for :mod:`~megatron_flux.comm.lanes`: of the device once it is pinned, else of this process."""
        self.pinned = False

    def tensor(self) -> torch.Tensor:
        """Return it as uint8 ``[nbytes]``, which keeps it mapped."""
        return torch.from_numpy(self._view)

    def pin(self) -> None:
        """Let CUDA use it."""
        self.lane = memory_ops.register(self.address, len(self._view))
        self.pinned = True

    def unpin(self) -> None:
        """The opposite."""
        if self.pinned:
            memory_ops.unregister(self.address)
            self.pinned = False


_dropped: list[list[Mapping]] = []
"""Pinned, and of nobody any more."""
_in_graphs: list[list[Mapping]] = []


class Regions:
    """The regions of a group, by rank."""

    def __init__(self, mappings: list[Mapping], lanes: list[int]) -> None:
        """From :func:`make`."""
        self._mappings = mappings
        self.host = [mapping.address for mapping in mappings]
        """Addresses for this process."""
        self.lanes = lanes
        """Addresses for :mod:`~megatron_flux.comm.lanes`: of the device, or again of this process."""
        self._finalizer: weakref.finalize | None = None
        if any(mapping.pinned for mapping in mappings):
            self._finalizer = weakref.finalize(self, _dropped.append, mappings)
            self._finalizer.atexit = False

    def never_free(self) -> None:
        """A CUDA graph holds the addresses from here on."""
        if self._finalizer is not None and self._finalizer.detach() is not None:
            _in_graphs.append(self._mappings)


def make(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> Regions:
    """A region of ``nbytes`` (a multiple of a page) for each rank of ``group``. Raises UserError; see the module."""
    _free_dropped(device)
    _enough(group, nbytes)
    mappings = _files(group, nbytes, functools.partial(_allocate, nbytes, device), pinned=device.type == "cuda")
    return Regions(mappings, [mapping.lane for mapping in mappings])


def tensors(group: dist.ProcessGroup, nbytes: int) -> list[torch.Tensor]:
    """uint8 ``[nbytes]`` for each rank of ``group``, zero; the system allocates what is touched. Collective. Raises
    SharedMemoryError.
    """
    return [mapping.tensor() for mapping in _files(group, nbytes, functools.partial(_sparse, nbytes), pinned=False)]


def _files(group: dist.ProcessGroup, nbytes: int, allocate: Callable[[], str], *, pinned: bool) -> list[Mapping]:
    """Map every rank's file, which ``allocate`` makes there. Collective."""
    names: list[str] = []
    mappings: list[Mapping] = []

    def own() -> str:
        names.append(allocate())
        return names[0]

    def map_all() -> None:
        for name in names[len(mappings) :]:
            mappings.append(Mapping(name, nbytes))
        for mapping in mappings:
            if pinned and not mapping.pinned:
                mapping.pin()

    def advice(_: bool) -> str:
        return _more(group, nbytes)

    about = f"sharing {-(-nbytes // _MIB)} MiB of {FOLDER}"
    try:
        names[:] = shared_memory.obtain(group, about, own, advice)
        shared_memory.obtain(group, f"{about} (mapping)", map_all, advice)
    except BaseException:
        for mapping in mappings:
            mapping.unpin()
        raise
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
    return mappings


def _free_dropped(device: torch.device) -> None:
    if _dropped and device.type == "cuda":
        torch.cuda.synchronize(device)
        while _dropped:
            for mapping in _dropped.pop():
                mapping.unpin()


def room() -> tuple[int, int]:
    """Bytes of shared memory that this process could have at all, and that are left of them; zeros where none is."""
    if not FOLDER.is_dir():
        return 0, 0
    there = os.statvfs(FOLDER)
    return there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize


def _enough(group: dist.ProcessGroup, nbytes: int) -> None:
    """Whether there is a host with memory enough, before anything is taken of it. Collective."""
    said = of_all_ranks((socket.gethostname(), *room()), group, "room in host memory")
    if len({host for host, *_ in said}) > 1:
        raise UserError("a link through host memory needs all ranks of a group on one host")
    total, free = min(total for _, total, _ in said), min(free for *_, free in said)
    if free < nbytes * group.size():
        raise SharedMemoryError(
            f"the link through host memory needs {-(-nbytes * group.size() // _MIB)} MiB of shared memory for "
            f"{group.size()} ranks, and {FOLDER} has {free // _MIB} MiB left of {total // _MIB}: {_more(group, nbytes)}"
        )


def _more(group: dist.ProcessGroup, nbytes: int) -> str:
    needed = -(-nbytes * group.size() // _MIB)
    return f"give the container more shared memory (docker run --shm-size={needed + 64}m, or --ipc=host)"


def _allocate(nbytes: int, device: torch.device) -> str:
    """The name of a file of that size, whose memory is there. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix="megatron_flux_host_", dir=FOLDER)
    try:
        with _near(device):
            os.posix_fallocate(handle, 0, nbytes)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(handle)
    return name


def _sparse(nbytes: int) -> str:
    folder = FOLDER if FOLDER.is_dir() else None
    handle, name = tempfile.mkstemp(prefix="megatron_flux_", dir=folder)
    try:
        os.ftruncate(handle, nbytes)
    finally:
        os.close(handle)
    return name


@contextlib.contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """Run this thread on processors of the GPU's NUMA node, where it may, so that what it allocates lies there."""
    allowed = os.sched_getaffinity(0)
    near = allowed & processors(device)
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        if near:
            os.sched_setaffinity(0, allowed)


def processors(device: torch.device) -> set[int]:
    """Those beside the GPU; empty where that is not known."""
    address = nvml.pci_address(device) if device.type == "cuda" else None
    if address is None:
        return set()
    try:
        return parsed((Path("/sys/bus/pci/devices") / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def parsed(text: str) -> set[int]:
    """``0-3,8`` as the system writes sets of processors. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
