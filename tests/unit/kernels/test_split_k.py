"""Tiles of the last round that are divided along k: every k block of every tile once, each part on a CTA of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

from megatron_flux.kernels.hopper import split_k
from megatron_flux.ops.kernel_config import last_round


@given(st.integers(1, 5000), st.integers(1, 450), st.integers(1, 200))
def test_parts_cover_every_tile(tiles: int, k_blocks: int, busy: int) -> None:
    left, parts = last_round(tiles, k_blocks, busy)
    assert left * parts <= busy
    if parts == 1:
        assert left == 0, "no tile is divided"
    covered = {t: [(0, k_blocks)] for t in range(tiles - left)}
    sums: dict[int, set[int]] = {}
    for unit in range(tiles - left, tiles + left * (parts - 1)):
        t, first, last = split_k.part_of.fn(unit, tiles, k_blocks, left, parts, True)
        assert first < last
        covered.setdefault(t, []).append((first, last))
        if unit >= tiles:
            sums.setdefault(t, set()).add(unit - tiles)
    assert sorted(covered) == list(range(tiles))
    for t in range(tiles - left, tiles):  # one behind the other, and where the CTA of the first part looks for them
        assert [first for first, _ in covered[t]] == [0, *(last for _, last in covered[t][:-1])]
        assert covered[t][-1][1] == k_blocks
        assert sums[t] == {(part - 1) * left + t - (tiles - left) for part in range(1, parts)}
    assert max((at for found in sums.values() for at in found), default=0) < busy, "the memory for sums"
