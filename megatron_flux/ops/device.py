"""Properties of a device: SMs for persistent kernels, compute capability, TMA."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

CPU_CTAS = 3


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the number of CTAs that a persistent kernel may have; a few on CPUs."""
    if device.type != "cuda":
        return CPU_CTAS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a CTA may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Return True if kernels address operands by TMA: from Hopper on."""
    if device.type != "cuda":
        return os.environ.get("MEGATRON_FLUX_TWIN_TMA", "1") == "1"
    return capability(device) >= (9, 0)
