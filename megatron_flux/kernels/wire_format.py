"""Layout of the wire formats (:mod:`megatron_flux.kernels.wire`): constants, sizes and views.

Layout of ``rows`` of ``k`` numbers in fp8: bytes ``[rows, k]``, padded to a multiple of 16, then scales ``[rows, ceil(k
/ 128)]`` in fp32, padded likewise.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_flux.settings import WIRES

EXACT, FP8 = WIRES
FP8_CAPABILITY = (8, 9)
"""Least compute capability of GPUs that convert to fp8."""
GROUP = 128
TINY = 1e-30
TOP, FORMAT = 448.0, torch.float8_e4m3fn

LaunchCache = dict[Any, Any]
"""Launched kernels by all that determines them but addresses; see :mod:`megatron_flux.kernels.launch`."""


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def groups(k: int) -> int:
    """Return the number of blocks of a row."""
    return -(-k // GROUP)


def nbytes(wire: str, rows: int, k: int, itemsize: int) -> int:
    """Return the encoded size of ``rows`` of ``k`` numbers of ``itemsize`` bytes."""
    return rows * k * itemsize if wire == EXACT else _up(rows * k) + _up(4 * rows * groups(k))


def parts(data: torch.Tensor, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View ``data`` (uint8 ``[..., nbytes]``) as numbers ``[..., rows, k]`` and scales ``[..., rows, blocks]``."""
    count, at = rows * groups(k), _up(rows * k)
    numbers, scales = data[..., : rows * k], data[..., at : at + 4 * count]
    return (
        numbers.view(FORMAT).unflatten(-1, (rows, k)),
        scales.view(torch.float32).unflatten(-1, (rows, groups(k))),
    )
