"""The schedule of the link through peers' memory: everything once, one stream each way, few crossings."""

import ctypes
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from megatron_flux.comm import p2p_link, p2p_schedule
from megatron_flux.comm.host_schedule import Program
from megatron_flux.comm.lanes import store
from megatron_flux.comm.p2p_schedule import CLOSED, IN, Islands, PeerLayout
from tests.unit.comm.test_host_schedule import CUTS, Ranks, driven

KINDS = ("gather", "exchange")
HALVES = {4: ((0, 1), (2, 3)), 6: ((0, 1, 2), (3, 4, 5)), 8: ((0, 2, 4, 6), (1, 3, 5, 7))}


class Gpus(Ranks):
    """The memory of all ranks of a group, with slots in GPUs, and what copies now."""

    at_rest = CLOSED

    def __init__(self, layout: PeerLayout) -> None:
        super().__init__(layout)
        self.on_gpus = [torch.zeros(layout.device_bytes, dtype=torch.uint8) for _ in range(self.tp)]
        self.slots = [memory.data_ptr() for memory in self.on_gpus]
        for region in self.regions:
            for word in layout.own_words():
                store(region + word, CLOSED)
        self.outbound: set[int] = set()
        self.inbound: set[int] = set()

    def program(self, kind: str, rank: int, islands: Islands | None) -> Program:
        rounds = getattr(p2p_schedule, kind)(self.tp, islands)
        exchange = kind == "exchange"
        return p2p_schedule.program(self.layout, rank, self.regions, self.slots, CUTS, rounds, exchange=exchange)

    def copies(self, rank: int, lane: int, slot: int, at: int, nbytes: int) -> list[Callable[[], bool]]:
        if lane == IN:
            return super().copies(rank, lane, slot, at, nbytes)
        target = next(r for r in range(self.tp) if 0 <= slot - self.slots[r] < self.layout.device_bytes)

        def begin() -> bool:
            assert rank not in self.outbound
            assert target not in self.inbound, "two write into a GPU at once"
            self.outbound.add(rank)
            self.inbound.add(target)
            return True

        def end() -> bool:
            ctypes.memmove(slot, at, nbytes)
            self.outbound.remove(rank)
            self.inbound.remove(target)
            return True

        return [begin, end]


@pytest.mark.parametrize("one_queue", [True, False], ids=["one queue", "two lanes"])
@pytest.mark.parametrize("tp", [2, 4, 6, 8])
def test_every_order_ends_and_moves_everything(tp: int, one_queue: bool) -> None:
    rng = random.Random(tp)
    for islands in dict.fromkeys((None, HALVES.get(tp))):
        for slots in (3, 4)[: 1 + (tp == 2)]:
            gpus = Gpus(PeerLayout(tp, 1500, slots))
            programs = {kind: [gpus.program(kind, rank, islands) for rank in range(tp)] for kind in KINDS}
            for kind in (*KINDS, *KINDS[: tp <= 4]):
                gpus.every_order(kind, programs[kind], one_queue, rng)


def test_a_flush_stands_between_a_wait_and_the_copy_behind_it() -> None:
    parts = Gpus(PeerLayout(2, 600, 3)).program("gather", 0, None).parts
    steps = [step for part in parts for step in part.steps]
    flushed = [one for step in steps for one in p2p_link._flushed(step)]
    reads = [step for step in steps if step.lane == IN and step.copies]
    assert len(flushed) == len(steps) + len(reads)
    for at, step in enumerate(flushed):
        if step.lane == IN and step.copies:
            (flush,) = driven(step.batch)
            assert (flush.operation, flush.address, flush.value, flush.flags) == (3, 0, 0, 0)
            assert flushed[at - 1].batch.waits
            assert not flushed[at - 1].copies


@pytest.mark.parametrize("tp", [2, 3, 4, 6, 8, 12])
def test_every_block_comes_once_and_nobody_is_idle(tp: int) -> None:
    halves: Islands = (tuple(range(0, tp, 2)), tuple(range(1, tp, 2)))
    for kind in KINDS:
        for islands in (None, halves)[: 1 + (tp % 2 == 0 and tp > 2)]:
            rounds = getattr(p2p_schedule, kind)(tp, islands)
            assert len(rounds) == tp - 1, "as few as there are blocks to get"
            for moves in rounds:
                assert sorted(m.source for m in moves) == sorted(m.target for m in moves) == list(range(tp))
            got = Counter((move.target, move.origin) for moves in rounds for move in moves)
            assert got == Counter((a, b) for a in range(tp) for b in range(tp) if a != b)
            assert kind == "gather" or all(move.origin == move.source for moves in rounds for move in moves)
