"""Operands where the kernels can address them.

Which kernel a call runs must be the same on all ranks, for kernels differ in what they send. So it may depend on
shapes, on which ranks agree, and not on where one rank's tensor happens to begin.
"""

from __future__ import annotations

import torch

BYTES = 16
"""TMA's, and what pointers are compiled for."""


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous and begins at a multiple of :data:`BYTES`."""
    return tensor.is_contiguous() and tensor.data_ptr() % BYTES == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if :func:`is_aligned`, else a copy that is."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)
