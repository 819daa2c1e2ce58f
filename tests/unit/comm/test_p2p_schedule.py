"""Who sends what to whom between GPUs that share PCIe: everything once, one stream each way, few crossings."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_flux.comm import p2p_schedule
from megatron_flux.comm.p2p_schedule import Islands, of_rank

HALVES = [((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0, 1, 2), (3, 4, 5)), ((0, 1, 2, 3), (4, 5, 6, 7)),
          ((0, 2, 4, 6), (1, 3, 5, 7)), (tuple(range(6)), tuple(range(6, 12)))]  # fmt: skip
CASES = [*((tp, None) for tp in (2, 3, 4, 8)), *((2 * len(islands[0]), islands) for islands in HALVES)]


@pytest.mark.parametrize(("tp", "islands"), CASES)
def test_every_block_comes_once_and_nobody_is_idle(tp: int, islands: Islands | None) -> None:
    for make in (p2p_schedule.gather, p2p_schedule.exchange):
        turns = make(tp, islands)
        assert len(turns) == tp - 1, "as few as there are blocks to get"
        has = {rank: {rank} for rank in range(tp)}
        got = Counter()
        for moves in turns:
            assert sorted(move.source for move in moves) == sorted(move.target for move in moves) == list(range(tp))
            assert all(move.origin in has[move.source] for move in moves), "what is forwarded has come before"
            for move in moves:
                has[move.target].add(move.origin)
                got[move.target, move.origin] += 1
        wanted = {(target, origin) for target in range(tp) for origin in range(tp) if target != origin}
        assert got == dict.fromkeys(wanted, 1)
        if make is p2p_schedule.exchange:
            assert all(move.origin == move.source for moves in turns for move in moves), "straight there"


def crossings(turns: list[list[p2p_schedule.Move]], islands: Islands) -> list[int]:
    """By turn, from the first island to the second; as many come back."""
    one, other = map(set, islands)
    counts = [[sum(move.source in a and move.target in b for move in moves) for moves in turns]
              for a, b in ((one, other), (other, one))]  # fmt: skip
    assert counts[0] == counts[1]
    return counts[0]


@pytest.mark.parametrize("islands", HALVES)
def test_few_cross_at_once(islands: Islands) -> None:
    size = len(islands[0])
    across = crossings(p2p_schedule.gather(2 * size, islands), islands)
    assert sum(across) == size, "each block once"
    assert max(across) == (1 if size in (3, 4) else size)
    across = crossings(p2p_schedule.exchange(2 * size, islands), islands)
    assert sum(across) == size * size
    if size <= 4:
        assert max(across) == -(-size * size // (2 * size - 1)), "as few as there can be"
    assert max(across) <= max(crossings(p2p_schedule.exchange(2 * size, None), (islands[0], islands[1])))


def test_what_a_rank_does() -> None:
    turns = of_rank(p2p_schedule.gather(4, ((0, 1), (2, 3))), 0)
    assert turns == [(2, 0, 2, 2), (1, 0, 1, 1), (1, 2, 1, 3)]
