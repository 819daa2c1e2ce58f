"""Operands where the kernels can address them.

Which kernel a call runs must be the same on all ranks, for kernels differ in what they send. So it may depend on
shapes, on which ranks agree, and not on where one rank's tensor happens to begin.
"""

from __future__ import annotations

import torch

BYTES = 16
"""TMA's, and what pointers are compiled for."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is contiguous and begins at a multiple of :data:`BYTES`, else a copy that is and does."""
    if tensor.is_contiguous() and tensor.data_ptr() % BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
