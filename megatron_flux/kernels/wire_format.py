"""Layout of the wire formats (:mod:`megatron_flux.kernels.wire`): constants, sizes and views.

Layout of ``rows`` of ``k`` numbers in int8: bytes ``[rows, blocks, 128]``, then scales ``[rows, blocks]`` in fp32,
padded to a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_flux.settings import WIRES

EXACT, INT8 = WIRES
GROUP = 128
TINY = 1e-30
TOP, FORMAT = 127.0, torch.int8

LaunchCache = dict[Any, Any]
"""Launched kernels by all that determines them but addresses; see :mod:`megatron_flux.kernels.launch`."""


def groups(k: int) -> int:
    """Return the number of blocks of a row."""
    return -(-k // GROUP)


def nbytes(wire: str, rows: int, k: int, itemsize: int) -> int:
    """Return the encoded size of ``rows`` of ``k`` numbers of ``itemsize`` bytes."""
    blocks = rows * groups(k)
    return rows * k * itemsize if wire == EXACT else blocks * GROUP + -(-4 * blocks // 16) * 16


def parts(data: torch.Tensor, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View ``data`` (uint8 ``[..., nbytes]``) as numbers ``[..., rows, blocks, 128]`` and scales ``[..., rows,
    blocks]``.
    """
    blocks = rows * groups(k)
    numbers, scales = data[..., : blocks * GROUP], data[..., blocks * GROUP :][..., : 4 * blocks]
    return (
        numbers.view(FORMAT).unflatten(-1, (rows, groups(k), GROUP)),
        scales.view(torch.float32).unflatten(-1, (rows, groups(k))),
    )
