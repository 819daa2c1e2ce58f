"""The CPU twin of symmetric memory: one shared file per rank, mapped by all ranks of the group.

It exists so that schedules, flags, epochs, reuse and time-outs are tested with real processes and real concurrency
where there is no GPU. It is not a fast path. All ranks must share a host and its shared-memory file system.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist


def shared(group: dist.ProcessGroup, nbytes: int) -> tuple[list[torch.Tensor], object]:
    """uint8 ``[nbytes]`` of every rank, this rank's own first zeroed by the system; collective over ``group``."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - mkstemp makes the file, private to us
    handle, mine = tempfile.mkstemp(prefix="megatron_flux_", dir=folder)
    os.ftruncate(handle, nbytes)
    os.close(handle)
    paths: list[str] = [""] * group.size()
    try:
        dist.all_gather_object(paths, mine, group=group)
        mapped = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
        dist.barrier(group=group)
    finally:
        os.unlink(mine)  # the mappings keep the memory alive
    return mapped, None
