"""Whose device memory it is: arms that take turns in one process, each measured as if it were the only one.

torch's allocator knows what a process holds, not for whom. Only its own trainer allocates during an arm's turn, so the
others hold what is allocated when a turn begins, less what this arm held when its last one ended. That is taken away
from the allocator's peak, whatever it is made of: weights, gradients, optimizer state, caches.

Two caches are emptied when a turn ends, since the next arm would use them and not pay for them: the unread weight
gradients that TransformerEngine and megatron-core keep by shape, as large as a layer's weights, and cuBLAS's
workspaces. Not where CUDA graphs hold their addresses. Tens of MB that other libraries keep for good count for the arm
that came first.

Symmetric memory is not in the allocator's figures: flux's workspaces, and those of torch's async-TP that the tuner may
choose, are added by their size. What NCCL, CUDA and its contexts take is in no figure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_flux.comm import group_state


class CudaAllocator:
    """torch's allocator of one device, in bytes."""

    def __init__(self, device: torch.device, *, forgets: bool) -> None:
        """``forgets``: shared caches may be emptied; no CUDA graph holds what is in them."""
        self._device, self._forgets = device, forgets

    def allocated(self) -> int:
        """What is allocated now."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The most since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def forget_shared(self) -> None:
        """Empty caches that the next arm would use."""
        if self._forgets:
            forget_dummy_gradients()
            torch._C._cuda_clearCublasWorkspaces()


def forget_dummy_gradients() -> None:
    """Drop the unread weight gradients that TransformerEngine keeps for all layers (megatron-core's use them too)."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()


def workspace_bytes() -> int:
    """Symmetric memory that this process holds: flux's, and torch's for async-TP."""
    module = sys.modules.get("torch.distributed._symmetric_memory")
    torchs = getattr(module, "_group_name_to_workspace_tensor", {}).values()
    return group_state.slab_bytes() + sum(tensor.nbytes for tensor in torchs if tensor is not None)


@dataclass(frozen=True)
class Peak:
    """Bytes of one arm; None where it is not known."""

    allocated: int | None
    """By torch's allocator, at the moment when it was most."""
    workspace: int
    """In symmetric memory, at the end."""

    @property
    def total(self) -> int | None:
        """Both."""
        return None if self.allocated is None else self.allocated + self.workspace


class OwnMemory:
    """One arm's."""

    def __init__(self, allocator: CudaAllocator | None) -> None:
        """Nothing is held yet. Without an allocator (CPU) only workspaces are known."""
        self._allocator = allocator
        self._own = self._own_workspace = 0
        self._others = self._others_workspace = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """What is allocated inside, and still there at the end, is this arm's. Not counted after an exception."""
        allocator = self._allocator
        self._others_workspace = workspace_bytes() - self._own_workspace
        if allocator is not None:
            self._others = allocator.allocated() - self._own
        yield
        self._own_workspace = workspace_bytes() - self._others_workspace
        if allocator is not None:
            allocator.forget_shared()
            self._own = allocator.allocated() - self._others

    def reset_peak(self) -> None:
        """Start measuring the peak anew."""
        if self._allocator is not None:
            self._allocator.reset_peak()

    def peak(self) -> Peak:
        """The most that this arm has held since :meth:`reset_peak`; only during its turn."""
        allocated = None if self._allocator is None else self._allocator.peak() - self._others
        return Peak(allocated, workspace_bytes() - self._others_workspace)
