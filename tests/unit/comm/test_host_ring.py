"""The layout of the link through host memory: nothing overlaps, and every byte of a call is in one chunk."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_flux import UserError
from megatron_flux.comm.host_program import LANES
from megatron_flux.comm.host_ring import (
    BEGUN,
    BUSY,
    EPOCH,
    HEAD,
    LINE,
    MIB,
    PAGE,
    POSITION,
    Layout,
    chunks,
    place,
    usual,
)  # fmt: skip


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [(2 * MIB, 6), (5000, 3)], ids=["usual", "odd"])
def test_slots_and_words_lie_apart(tp: int, sizes: tuple[int, int]) -> None:
    layout = Layout(tp, *sizes)
    for owner in range(tp):
        readers = [rank for rank in range(tp) if rank != owner]
        slots = [layout.slot(use) for use in range(layout.slots)]
        assert len(set(slots)) == len(slots)
        slots.sort()
        assert all(after - before >= layout.slot_bytes for before, after in itertools.pairwise(slots))
        assert all(slot % PAGE == 0 for slot in slots)
        assert slots[-1] + layout.slot_bytes <= layout.region_bytes
        words = [word for reader in readers for word in layout.words_of(reader)]
        assert len(set(words)) == len(words)
        assert set(words) <= set(layout.own_words())
        assert max(words) + LINE <= slots[0]
        assert min(words) >= PAGE


def test_a_ring_turns() -> None:
    layout = Layout(4)
    assert layout.slot(0) == layout.slot(layout.slots) != layout.slot(1)
    assert layout.word(1, 2) == layout.word(1 + layout.slots, 2)


def test_what_lanes_write_down_lies_apart() -> None:
    words = [BEGUN, *(place(lane, what) for lane in LANES for what in (EPOCH, POSITION, BUSY))]
    assert len(set(words)) == len(words)
    assert max(words) + 4 <= HEAD


def test_the_size_that_users_are_told() -> None:
    assert [round(usual(tp).total_bytes / MIB) for tp in (2, 4, 8)] == [32, 32, 64]


def test_short_rings_are_refused() -> None:
    with pytest.raises(UserError, match="needs at least 3 slots, 2 were given"):
        Layout(2, MIB, 2)


def test_chunks_cover_everything_once() -> None:
    rng = random.Random(0)
    for _ in range(300):
        first = rng.randrange(10**6)
        total, most = rng.randrange(1, 10**6), rng.randrange(600, 10**6)
        found = chunks(first, first + total, most)
        assert [at for at, _ in found] == [first + sum(n for _, n in found[:i]) for i in range(len(found))]
        assert sum(n for _, n in found) == total
        assert max(n for _, n in found) <= most
        assert min(n for _, n in found) > 0
    assert chunks(7, 7, 100) == []
    assert len(chunks(0, 2 * MIB, 2 * MIB)) == 1
