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
    whole = tiles - left
    assert parts > 1 or left == 0, "no tile is divided"
    covered: dict[int, list[tuple[int, int]]] = {}
    shares: dict[int, list[int]] = {}
    for unit in range(whole, tiles + left * (parts - 1)):
        t, first, last, hands_over = split_k.part_of.fn(unit, tiles, k_blocks, left, parts, True)
        assert first < last
        assert hands_over == (unit >= whole + left * (parts - 1))
        if not hands_over:
            assert unit - whole == len(covered.get(t, ())) * left + t - whole < busy, "where the last part looks for it"
        covered.setdefault(t, []).append((first, last))
        shares.setdefault(t, []).append(unit % busy)
    assert sorted(covered) == list(range(whole, tiles))
    for t in covered:
        assert [first for first, _ in covered[t]] == [0, *(last for _, last in covered[t][:-1])]
        assert covered[t][-1][1] == k_blocks
        # Who waits has a share of a higher number than those that are waited for, and each has its own.
        assert shares[t] == sorted(set(shares[t]))
    assert len({share for of_tile in shares.values() for share in of_tile}) == left * parts


def test_only_a_last_round_that_leaves_sms_idle_is_divided() -> None:
    assert last_round(320, 216, 132) == (56, 2)  # 2.42 rounds
    assert last_round(1024, 224, 132) == (0, 1)  # 7.76 rounds
    assert last_round(400, 128, 132) == (4, 5), "more parts take longer to add than they save"
    assert last_round(320, 8, 132) == (0, 1), "too few blocks of k"
    assert last_round(264, 216, 132) == (0, 1)
