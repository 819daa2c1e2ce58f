"""Programs of the link through host memory, run in one process in every order that queues allow."""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux import cuda_driver
from megatron_flux.comm import host_schedule
from megatron_flux.comm.host_schedule import (
    EMPTY,
    Layout,
    Program,
)  # fmt: skip
from megatron_flux.comm.lanes import DOWN, LANES, Batch, Behind, Mark, read, store
from megatron_flux.cuda_driver import WRITE, WordOp

CUTS = [0, 700, 701, 9000]
SIZE = CUTS[-1]


class Params(ctypes.Structure):
    """``CUstreamBatchMemOpParams.waitValue`` and ``.writeValue`` of cuda.h, as the compiler lays them out."""

    _fields_ = (
        ("operation", ctypes.c_int), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64),
    )  # fmt: skip


class Driver:
    """Keeps what it is given. Called, it is itself: a mock takes longer than the batch, and there are thousands."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.got = status, []

    def __call__(self) -> Driver:
        return self

    def cuStreamBatchMemOp_v2(  # noqa: N802
        self, stream: ctypes.c_void_p, count: ctypes.c_uint, operations: ctypes.c_void_p, flags: ctypes.c_uint
    ) -> int:
        assert flags.value == 0
        assert 0 < count.value <= 255
        address = operations.value or 0
        self.got += [Params.from_buffer_copy(ctypes.string_at(address + 48 * i, 48)) for i in range(count.value)]
        return self.status

    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: ctypes.c_size_t, stream: ctypes.c_void_p) -> int:  # noqa: N802
        ctypes.memmove(getattr(target, "value", target), getattr(source, "value", source), nbytes.value)
        return self.status


def driven(batch: Batch) -> list[Params]:
    driver = Driver()
    with mock.patch.object(cuda_driver, "library", driver):
        cuda_driver.run([cuda_driver.call_of(batch.table, 0)], [])
    assert [(one.operation, one.address, one.value) for one in driver.got] == batch.operations
    return driver.got


class Ranks:
    at_rest = EMPTY

    def __init__(self, layout: Layout) -> None:
        self.layout, self.tp = layout, layout.tp
        self.memory = [torch.zeros(layout.region_bytes, dtype=torch.uint8) for _ in range(self.tp)]
        self.regions = [region.data_ptr() for region in self.memory]
        self.sent = [torch.zeros(self.tp, SIZE, dtype=torch.uint8) for _ in range(self.tp)]
        self.theirs = [torch.zeros(self.tp, SIZE, dtype=torch.uint8) for _ in range(self.tp)]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for sent, theirs in zip(self.sent, self.theirs, strict=True):
            sent.copy_(torch.randint(0, 256, sent.shape, generator=generator, dtype=torch.uint8))
            theirs.fill_(0xEE)

    def every_order(self, kind: str, programs: list[Program], one_queue: bool, rng: random.Random) -> None:
        """Run the programs of all ranks in an order of chance: all has moved, and words are as before."""
        self.fill(rng.randrange(1 << 30))
        queues = []
        for rank, program in enumerate(programs):
            every = self.operations(rank, program)
            lanes = [[one for at, one in every if one_queue or at == lane] for lane in LANES]
            queues += lanes[:1] if one_queue else lanes
        run(queues, rng)
        for rank, peer in itertools.product(range(self.tp), repeat=2):
            want = self.sent[peer][rank if kind == "exchange" else 0]
            if peer == rank:
                want = torch.full_like(want, 0xEE)
            assert torch.equal(self.theirs[rank][peer], want), (kind, rank, peer)
        assert {read(at + word) for at in self.regions for word in self.layout.own_words()} == {self.at_rest}

    def operations(self, rank: int, program: Program) -> list[tuple[int, Callable[[], bool]]]:
        """``(lane, operation)``: each returns whether it has run."""
        found: list[tuple[int, Callable[[], bool]]] = []
        done, own = [0] * len(LANES), self.sent[rank].data_ptr()
        for part in program.parts:
            for step in part.steps:
                if isinstance(step, Mark):
                    noted, given = step.lane, sum(at == step.lane for at, _ in found)
                    continue
                if isinstance(step, Behind):
                    found += [(lane, lambda noted=noted, given=given: done[noted] >= given) for lane in step.lanes]
                    continue
                lane, batch, copies = step
                found += [(lane, self.word(one)) for one in driven(batch)]
                for row, offset, slot, nbytes in copies:
                    assert row != self.tp or lane == DOWN
                    at = (own if row == self.tp else self.theirs[rank][row].data_ptr()) + offset
                    found += [(lane, one) for one in self.copies(rank, lane, slot, at, nbytes)]

        def counted(lane: int, operation: Callable[[], bool]) -> bool:
            has_run = operation()
            done[lane] += has_run
            return has_run

        return [(lane, functools.partial(counted, lane, operation)) for lane, operation in found]

    def copies(self, rank: int, lane: int, slot: int, at: int, nbytes: int) -> list[Callable[[], bool]]:
        copy = (slot, at, nbytes) if lane == DOWN else (at, slot, nbytes)
        return [lambda: ctypes.memmove(*copy) is not None]

    @staticmethod
    def word(one: Params) -> Callable[[], bool]:
        if one.operation == 2:
            assert one.flags == 0
            return lambda: store(one.address, one.value) is None
        assert (one.operation, one.flags) == (1, 1), "wait until it is equal"
        return lambda: read(one.address) == one.value


def run(queues: list[list[Callable[[], bool]]], rng: random.Random) -> None:
    places = [0] * len(queues)
    while True:
        left = [i for i, queue in enumerate(queues) if places[i] < len(queue)]
        if not left:
            return
        rng.shuffle(left)
        favourite = rng.random() < 0.7  # one runs far ahead of others
        for i in left:
            moved = False
            while places[i] < len(queues[i]) and queues[i][places[i]]():
                places[i] += 1
                moved = True
                if not favourite:
                    break
            if moved:
                break
        else:
            raise AssertionError(f"nothing can go on: {places} of {[len(queue) for queue in queues]}")


@pytest.mark.parametrize("one_queue", [True, False], ids=["one queue", "two lanes"])
@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_every_order_ends_and_moves_everything(tp: int, one_queue: bool) -> None:
    rng = random.Random(tp)
    for slots in (3, 6)[: 2 if tp <= 4 else 1]:
        ranks = Ranks(Layout(tp, 600, slots))
        programs = {
            kind: [
                host_schedule.program(ranks.layout, rank, ranks.regions, CUTS, exchange=kind == "exchange")
                for rank in range(tp)
            ]
            for kind in ("gather", "exchange")
        }
        for kind in ("gather", "exchange", "exchange", "gather")[: 4 if tp <= 3 else 3]:
            ranks.every_order(kind, programs[kind], one_queue, rng)


def test_what_is_laid_out_keeps_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "library", Driver())
    table = cuda_driver.table([WordOp(WRITE, 0, 0)])
    kept, laid_out = weakref.ref(table), cuda_driver.call_of(table, 7)
    del table
    assert kept() is not None
    del laid_out
    assert kept() is None
