"""What the link through host memory enqueues, run in one process in every order that queues allow.

Each rank is one queue for everything, the strictest that a GPU may be, or a queue for each lane. Whoever can go on is
chosen at random. Memory operations are run from what the driver would get, read by the structure in cuda.h.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux import cuda_memory_ops as memory_ops
from megatron_flux.comm import host_program
from megatron_flux.comm.host_program import DOWN, Copy, Program, StepEnds, Words
from megatron_flux.comm.host_ring import Layout
from megatron_flux.comm.lanes import Batch, Wait, read, store
from megatron_flux.comm.transport import source, steps
from megatron_flux.cuda_memory_ops import WAIT, WRITE, Packed, WordOp
from megatron_flux.errors import OperatorError

CUTS = [0, 700, 701, 9000]
SIZE = CUTS[-1]


class Params(ctypes.Structure):
    """``CUstreamBatchMemOpParams.waitValue`` and ``.writeValue`` of cuda.h, as the compiler lays them out."""

    _fields_ = (
        ("operation", ctypes.c_int), ("address", ctypes.c_uint64), ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint), ("alias", ctypes.c_uint64),
    )  # fmt: skip


class Driver:
    """Keeps what it is given."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.got = status, []

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, array: Any, flags: int) -> int:  # noqa: N802
        assert flags == 0
        assert count <= 255
        assert len(array) == 48 * count
        text = bytes(array)
        for i in range(count):
            self.got.append(Params.from_buffer_copy(text, 48 * i))
        return self.status


def driven(batch: Batch) -> list[Params]:
    driver = Driver()
    with mock.patch.object(memory_ops, "_driver", return_value=driver):
        batch.packed.enqueue(0)
    assert len(driver.got) == len(batch.operations)
    return driver.got


class Ranks:
    """The memory of all ranks of a group."""

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

    def operations(self, rank: int, program: Program, kind: str) -> list[tuple[int, Callable[[], bool]]]:
        """``(lane, operation)``: each returns whether it has run."""
        found = []
        order = iter(steps(rank, self.tp, len(CUTS) - 1))
        peer, piece = next(order) if kind == "exchange" else (0, 0)
        for action in program.actions:
            if isinstance(action, StepEnds):
                peer, piece = next(order, (0, 0))
            elif isinstance(action, Words):
                found += [(action.lane, self.word(one)) for one in driven(action.batch)]
            elif isinstance(action, Copy):
                if action.lane == DOWN:
                    at = self.sent[rank][peer if kind == "exchange" else 0].data_ptr() + CUTS[piece] + action.offset
                    copy = (action.host, at, action.nbytes)
                else:
                    copy = (self.theirs[rank][action.row].data_ptr() + action.offset, action.host, action.nbytes)
                found.append((action.lane, lambda copy=copy: ctypes.memmove(*copy) is not None))
        return found

    @staticmethod
    def word(one: Params) -> Callable[[], bool]:
        if one.operation == 2:
            assert one.flags == 0
            return lambda: store(one.address, one.value) is None
        assert (one.operation, one.flags) == (1, 1), "wait until it is equal"
        return lambda: read(one.address) == one.value


def run(queues: list[list[Callable[[], bool]]], rng: random.Random) -> None:
    """Everything, in an order of chance."""
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
    for slots in ((3, 3), (6, 4)):
        ranks = Ranks(Layout(tp, 600, *slots))
        programs = {
            kind: [getattr(host_program, kind)(ranks.layout, rank, ranks.regions, CUTS) for rank in range(tp)]
            for kind in ("gather", "exchange")
        }
        for seed in range(4):
            kind = ("gather", "exchange")[(seed + seed // 2) % 2]
            ranks.fill(seed)
            queues = []
            for rank in range(tp):
                every = ranks.operations(rank, programs[kind][rank], kind)
                lanes = (
                    [[one for _, one in every]]
                    if one_queue
                    else [[one for at, one in every if at == i] for i in (0, 1)]
                )
                queues += lanes
            run(queues, rng)
            for rank, peer in itertools.permutations(range(tp), 2):
                row = rank if kind == "exchange" else 0
                assert torch.equal(ranks.theirs[rank][peer], ranks.sent[peer][row]), (kind, rank, peer)
            for rank in range(tp):
                assert (ranks.theirs[rank][rank] == 0xEE).all()
                assert not any(read(ranks.regions[rank] + word) for word in ranks.layout.own_words())


def test_the_words_of_a_gather_say_where_its_pieces_end() -> None:
    layout = Layout(3, 600, 3, 3)
    program = host_program.gather(layout, 0, [0, 1 << 30, 2 << 30], CUTS)
    arrived = [action.piece for action in program.actions if isinstance(action, host_program.Arrived)]
    assert arrived == [0, 1, 2]
    assert isinstance(program.actions[-1], Words)


def test_steps_of_an_exchange_fit_each_other() -> None:
    for tp in (2, 3, 4, 8):
        for number in range(2 * (tp - 1)):
            sends = {rank: steps(rank, tp, 2)[number] for rank in range(tp)}
            for rank, (peer, piece) in sends.items():
                assert sends[source(rank, tp, peer)] == (rank, piece)


def test_many_operations_are_several_calls() -> None:
    driver = Driver()
    with mock.patch.object(memory_ops, "_driver", return_value=driver):
        Packed([WordOp(WRITE, 4 * i, i) for i in range(600)]).enqueue(7)
    assert [one.address for one in driver.got] == [4 * i for i in range(600)]
    assert [one.value for one in driver.got] == list(range(600))


def test_what_cuda_refuses_is_an_operator_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ops, "_driver", lambda: Driver(801))
    monkeypatch.setattr(memory_ops, "refused", lambda what, status: OperatorError(f"{what} ({status})"))
    with pytest.raises(OperatorError, match=r"1 memory operations in a stream \(801\)"):
        Packed([WordOp(WRITE, 0, 0)]).enqueue(7)


def test_the_first_wait_that_is_not_met_is_named() -> None:
    words = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    at = [words.data_ptr() + 4 * i for i in range(4)]
    batch = Batch(
        [WordOp(WRITE, at[3], 9), WordOp(WAIT, at[0], 0), WordOp(WAIT, at[1], 1), WordOp(WAIT, at[2], 1)],
        [Wait(5, 0), Wait(6, 0), Wait(7, 3)],
    )
    assert batch.unmet() == Wait(7, 3)
    words[2] = 1
    assert batch.unmet() is None
