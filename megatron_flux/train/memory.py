"""Device memory of one of several trainers in a process, and caches between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_flux.comm import group_state
from megatron_flux.layers import keep


def forget_dummy_gradients() -> None:
    """Drop the unread weight gradients that TransformerEngine keeps for all layers (megatron-core's use them too)."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    getattr(base, "_dummy_wgrads", {}).clear()


class OwnMemory:
    """Device memory of one trainer of several in a process, measured as if it were the only one.

    Only the active trainer allocates. So the others hold what is allocated when it becomes active, less what it held
    when it last was; that is taken away from the allocator's peak. What it would leave to the next one (unread weight
    gradients, cuBLAS's workspaces) is freed when it ceases to be active, but where CUDA graphs hold the addresses
    (``captured``). Flux's symmetric memory is added. What NCCL, CUDA and other libraries take is in no figure.
    """

    def __init__(self, device: torch.device, *, captured: bool = False) -> None:
        self._device, self._on_gpu, self._captured = device, device.type == "cuda", captured
        self._own = self._own_workspace = self._others = self._others_workspace = 0

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._on_gpu else 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count what is allocated inside, and still held at the end, as this trainer's; not after an exception."""
        self._others_workspace = group_state.slab_bytes() - self._own_workspace
        self._others = self._allocated() - self._own
        yield
        self._own_workspace = group_state.slab_bytes() - self._others_workspace
        if self._on_gpu and not self._captured:
            forget_dummy_gradients()
            torch._C._cuda_clearCublasWorkspaces()
        self._own = self._allocated() - self._others

    def reset_peak(self) -> None:
        """Start measuring the peak anew, and that of kept gathered inputs."""
        keep.reset_peak()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> dict[str, int | None]:
        """Return the bytes that this trainer, which is active, has held at most since :meth:`reset_peak`: in torch's
        allocator (None on CPUs), in symmetric memory at the end, and their sum.
        """
        allocated = torch.cuda.max_memory_allocated(self._device) - self._others if self._on_gpu else None
        workspace = group_state.slab_bytes() - self._others_workspace
        both = None if allocated is None else allocated + workspace
        return {"peak_memory_bytes": both, "allocated_peak_bytes": allocated, "workspace_bytes": workspace}
