"""Sizes of slabs: bounded waste, and no slab for every little difference of shape."""

from __future__ import annotations

import pytest

from megatron_flux.comm.slab import MIB, size_class


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (1, 4 * MIB),
        (4 * MIB, 4 * MIB),
        (4 * MIB + 1, 4 * MIB + MIB // 2),
        (192 * MIB, 192 * MIB),  # GPT-3 175B, 8192 tokens: exact
        (128 * MIB, 128 * MIB),  # Llama-70B
        (193 * MIB, 208 * MIB),
    ],
)
def test_size_class(nbytes: int, size: int) -> None:
    assert size_class(nbytes) == size


def test_size_class_wastes_at_most_an_eighth() -> None:
    for nbytes in range(4 * MIB, 300 * MIB, 777_777):
        assert nbytes <= size_class(nbytes) <= nbytes * 9 / 8
        assert size_class(nbytes) % 1024 == 0
