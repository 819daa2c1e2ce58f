"""The link through peers' memory, on processes that share that of the host: flat, and over two islands.

The cases of test_host_link, with the same content; slots are small, so that each is used many times in a call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import host_memory
from megatron_flux.comm.lanes import read
from megatron_flux.comm.p2p_link import P2PLink
from megatron_flux.comm.p2p_program import CLOSED, PeerLayout
from megatron_flux.comm.transport import unbroken
from megatron_flux.errors import OperatorError, UserError
from tests.distributed.pool import WorkerPool
from tests.distributed.test_host_link import CPU, content, cuts_of, exchange, files, gather

pytestmark = pytest.mark.distributed

QUEUES = pytest.mark.parametrize("one_queue", [True, False], ids=["one queue", "two lanes"])
FLAT, ISLANDS = None, ((0, 2), (1, 3))


def link(one_queue: bool, group: dist.ProcessGroup | None = None) -> P2PLink:
    group = group or dist.group.WORLD
    islands = ISLANDS if group.size() == 4 else FLAT
    return P2PLink(group, CPU, PeerLayout(group.size(), 1500, 3), islands=islands, one_queue=one_queue)


def random_calls(one_queue: bool, calls: int) -> None:
    at, rng, own = link(one_queue), random.Random(7), random.Random(dist.get_rank())
    for seed in range(calls):
        if seed == calls // 2:
            at.use(FLAT)
        if own.random() < 0.3:
            time.sleep(0.01)
        (gather if rng.random() < 0.5 else exchange)(at, seed, cuts_of(rng))
    dist.barrier()
    deadline = time.monotonic() + 10
    for region in at._progress.regions.host:
        for word in at.layout.own_words():
            while read(region + word) != CLOSED and time.monotonic() < deadline:
                time.sleep(0.001)
            assert read(region + word) == CLOSED, "it is nobody's turn"
    dist.barrier()


@QUEUES
def test_everything_arrives(world: WorkerPool, one_queue: bool) -> None:
    world.run(random_calls, one_queue, 30)


def late(one_queue: bool) -> None:
    """Each rank in turn comes late, and is slow in the middle of a call; gathers stay open over other calls."""
    at, cuts = link(one_queue), [0, 9000, 30_000]
    for who in range(at.tp):
        if at.rank == who:
            time.sleep(0.1)
        gather(at, who, cuts)
        exchange(at, who, cuts, slow=0.02 if at.rank == who else 0.0)
    opened = []
    for seed in range(3):
        theirs = torch.zeros(at.tp, cuts[-1], dtype=torch.uint8)
        opened.append((at.gather("all_gather", content(seed, at.rank, cuts[-1]), theirs, cuts), theirs))
        opened[-1][0].enqueue()
        if at.rank == seed % at.tp:
            time.sleep(0.1)
    exchange(at, 9, cuts)
    for seed, (call, theirs) in reversed(list(enumerate(opened))):
        call.wait()
        call.wait()
        for peer in range(at.tp):
            assert peer == at.rank or torch.equal(theirs[peer], content(seed, peer, cuts[-1]))


@QUEUES
def test_late_ranks_are_waited_for(world4: WorkerPool, one_queue: bool) -> None:
    world4.run(late, one_queue)


def never_comes() -> str:
    with mock.patch.dict(os.environ, {"MEGATRON_FLUX_TIMEOUT_S": "2"}):
        at = link(True)
        gather(at, 0, [0, 5000])
        if at.rank == 1:
            dist.barrier()
            return ""
        with pytest.raises(OperatorError) as caught:
            exchange(at, 1, [0, 9000])
        with pytest.raises(OperatorError, match="timed out"):
            gather(at, 2, [0, 10])
        dist.barrier()
        return str(caught.value)


def test_a_wait_that_lasts_too_long_says_for_whom(world2: WorkerPool) -> None:
    said = world2.run(never_comes)[0]
    assert "gemm_reduce_scatter timed out after 2 s waiting for peer rank 1 (tp rank 1), shard " in said
    assert ", epoch 2; the peer's last epoch here is 1" in said


def shared_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("megatron_flux_")}


def broken_off_and_dropped() -> None:
    before = shared_files()
    at = link(False)
    with contextlib.suppress(KeyError), unbroken(at, "gemm_reduce_scatter"):
        at.exchange("gemm_reduce_scatter", torch.zeros(2, 10, dtype=torch.uint8), [0, 10])
        raise KeyError("a kernel that cannot be compiled")
    with pytest.raises(OperatorError, match="a call of gemm_reduce_scatter was broken off here by KeyError"):
        gather(at, 0, [0, 10])
    at = link(True)
    gather(at, 1, [0, 10])
    del at
    gc.collect()
    assert not files()
    for _ in range(50):  # other tests' files have a name for a moment
        if not shared_files() - before:
            break
        time.sleep(0.1)
    else:
        raise AssertionError(shared_files() - before)
    dist.barrier()


def test_a_call_that_was_broken_off_is_the_last(world2: WorkerPool) -> None:
    world2.run(broken_off_and_dropped)


def refused() -> str:
    fails = mock.patch.object(host_memory, "_sparse", side_effect=RuntimeError("no handle of that kind\nat ..."))
    if dist.get_rank() == 1:
        fails.start()
    try:
        with pytest.raises(UserError) as caught:
            link(True)
    finally:
        mock.patch.stopall()
    gather(link(True), 0, [0, 3000])
    return str(caught.value)


def test_memory_that_one_rank_cannot_have(world2: WorkerPool) -> None:
    for said in world2.run(refused):
        assert "failed (tp rank 1: RuntimeError: no handle of that kind at ...): " in said


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(4)
    yield pool
    pool.stop()


def killed() -> str:
    with mock.patch.dict(os.environ, {"MEGATRON_FLUX_TIMEOUT_S": "2"}):
        at = link(False)
        gather(at, 0, [0, 5000])
        call = at.exchange("gemm_reduce_scatter", torch.zeros(4, 40_000, dtype=torch.uint8), [0, 20_000, 40_000])
        try:
            for number, _ in enumerate(call.steps):
                if at.rank == 2 and number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                call.send(torch.zeros(20_000, dtype=torch.uint8))
            call.wait()
        except OperatorError as error:
            return str(error)
        return "nothing was said"


def test_a_killed_rank_ends_the_others_and_leaves_nothing(pool: WorkerPool) -> None:
    outcomes = pool.outcomes(killed)
    assert outcomes[2].error == "the process ended with exit code -9"
    for rank in (0, 1, 3):
        assert "gemm_reduce_scatter timed out after 2 s waiting for peer rank" in (outcomes[rank].value or ""), outcomes
    assert any("waiting for peer rank 2 " in outcomes[rank].value for rank in (0, 1, 3))
    assert not files()
