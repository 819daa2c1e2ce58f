"""Allocating memory that the ranks of a group share: the one way to it, for slabs, host memory and peers' memory.

:func:`obtain` is a step of such an allocation. It succeeds on all ranks, or raises SharedMemoryError on all of them: no
peer waits for a rank that had no memory. A rank without memory first gives back what torch has cached and tries again:
torch's symmetric memory and pinned memory do not come from torch's own allocator, which would do that by itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_flux.comm.agreement import TogetherError, together
from megatron_flux.errors import OperatorError, SharedMemoryError, one_line

_Result = TypeVar("_Result")


def obtain(
    group: dist.ProcessGroup, about: str, work: Callable[[], _Result], advice: Callable[[bool], str]
) -> list[_Result]:
    """Return what ``work()`` returns on every rank; collective. ``advice(full)`` says what to do where there was not
    memory enough (``full``), and where it failed for another reason.
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


def symmetric(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[list[torch.Tensor], Any]:
    """uint8 ``[nbytes]`` on every rank's GPU by torch's symmetric memory, and what keeps it mapped. Collective. Raises
    SharedMemoryError.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symm_mem

    made: list[Any] = []
    tensors: list[torch.Tensor] = []

    def allocate() -> None:
        made.append(symm_mem.empty(nbytes, dtype=torch.uint8, device=device))

    def map_all() -> None:
        handle = symm_mem.rendezvous(made[0], group)
        if handle.multicast_ptr:
            raise OperatorError(
                "torch made an NVLink multicast object; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before "
                "torch.distributed is imported"
            )
        made.append(handle)
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
    return tensors, made


def _is_full(words: str) -> bool:
    """Return True if ``words`` of an error speak of too little memory; torch and the driver have no type for it."""
    words = words.lower().replace("_", " ")
    return any(part in words for part in ("out of memory", "no space left", "cannot allocate memory"))
