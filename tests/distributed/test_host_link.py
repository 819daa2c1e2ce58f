"""The link through host memory, on processes and their processor: everything arrives, whoever is late.

Every case runs with two lanes that are threads and with one queue for everything, the strictest order that GPUs with
``CUDA_DEVICE_MAX_CONNECTIONS=1`` can fall back to. Slots are small, so that each is used many times in a call.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import host_memory
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.host_ring import Layout
from megatron_flux.comm.transport import unbroken
from megatron_flux.errors import OperatorError, UserError
from tests.distributed.pool import WorkerPool
from tests.small_disk import small_disk

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
QUEUES = pytest.mark.parametrize("one_queue", [True, False], ids=["one queue", "two lanes"])


def layout(tp: int) -> Layout:
    return Layout(tp, slot_bytes=1500, slots=4)


def link(one_queue: bool, group: dist.ProcessGroup | None = None) -> HostLink:
    group = group or dist.group.WORLD
    return HostLink(group, CPU, layout(group.size()), one_queue=one_queue)


def content(seed: int, who: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + who)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


def cuts_of(rng: random.Random) -> list[int]:
    pieces = rng.randrange(1, 5)
    return [0, *sorted(rng.sample(range(1, 40_000), pieces))]


def gather(at: HostLink, seed: int, cuts: list[int]) -> None:
    tp, rank, nbytes = at.tp, at.rank, cuts[-1]
    theirs = torch.full((tp, nbytes), 0xEE, dtype=torch.uint8)
    seen = []
    call = at.gather("all_gather_gemm", content(seed, rank, nbytes), theirs, cuts)
    for peer, piece in call:
        part = slice(cuts[piece], cuts[piece + 1])
        assert torch.equal(theirs[peer, part], content(seed, peer, nbytes)[part]), (seed, peer, piece)
        seen.append((piece, peer))
    assert len(seen) == len(set(seen)) == (tp - 1) * (len(cuts) - 1)
    for peer in range(tp):
        want = torch.full((nbytes,), 0xEE, dtype=torch.uint8) if peer == rank else content(seed, peer, nbytes)
        assert torch.equal(theirs[peer], want)


def exchange(at: HostLink, seed: int, cuts: list[int], slow: float = 0.0) -> None:
    tp, rank, nbytes = at.tp, at.rank, cuts[-1]
    theirs = torch.full((tp, nbytes), 0xEE, dtype=torch.uint8)
    call = at.exchange("gemm_reduce_scatter", theirs, cuts)
    for peer, piece in call.steps:
        time.sleep(slow)
        call.send(content(seed, tp * rank + peer, nbytes)[cuts[piece] : cuts[piece + 1]].clone())
    call.wait()
    for peer in range(tp):
        if peer != rank:
            assert torch.equal(theirs[peer], content(seed, tp * peer + rank, nbytes)), (seed, peer)
    assert (theirs[rank] == 0xEE).all()


def random_calls(one_queue: bool, calls: int) -> None:
    at = link(one_queue)
    rng = random.Random(7)
    own = random.Random(dist.get_rank())
    for seed in range(calls):
        cuts = cuts_of(rng)
        if own.random() < 0.3:
            time.sleep(0.01)
        if rng.random() < 0.5:
            gather(at, seed, cuts)
        else:
            exchange(at, seed, cuts)
    assert len(at._programs) <= calls
    words = at._progress.regions.host
    for region in words:  # every slot is empty again
        for offset in at.layout.own_words():
            from megatron_flux.comm.lanes import read

            deadline = time.monotonic() + 10
            while read(region + offset) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert read(region + offset) == 0
    dist.barrier()


@QUEUES
def test_everything_arrives(world: WorkerPool, one_queue: bool) -> None:
    world.run(random_calls, one_queue, 40)


def late(one_queue: bool) -> None:
    """Each rank in turn comes late, and in turn is slow in the middle of a call: slots wait for it in both roles."""
    at = link(one_queue)
    cuts = [0, 9000, 30_000]
    for who in range(at.tp):
        if at.rank == who:
            time.sleep(0.2)
        gather(at, who, cuts)
        exchange(at, who, cuts, slow=0.03 if at.rank == who else 0.0)
        gather(at, 50 + who, cuts)
    # A reader that is late with a call whose slots the writer would use again at once.
    theirs = torch.zeros(at.tp, 30_000, dtype=torch.uint8)
    for seed in range(3):
        call = at.gather("all_gather", content(seed, at.rank, 30_000), theirs, cuts)
        if at.rank == seed % at.tp:
            time.sleep(0.2)
        call.wait()
        for peer in range(at.tp):
            if peer != at.rank:
                assert torch.equal(theirs[peer], content(seed, peer, 30_000))


@QUEUES
def test_late_ranks_are_waited_for(world4: WorkerPool, one_queue: bool) -> None:
    world4.run(late, one_queue)


def gathers_left_open(one_queue: bool) -> None:
    """Several that were begun together, and an exchange before any of them is waited for."""
    at = link(one_queue)
    cuts = [0, 20_000]
    opened = []
    for seed in range(3):
        theirs = torch.zeros(at.tp, cuts[-1], dtype=torch.uint8)
        call = at.gather("all_gather", content(seed, at.rank, cuts[-1]), theirs, cuts)
        call.enqueue()
        opened.append((call, theirs))
    exchange(at, 9, cuts)
    for seed, (call, theirs) in reversed(list(enumerate(opened))):
        call.wait()
        call.wait()
        for peer in range(at.tp):
            if peer != at.rank:
                assert torch.equal(theirs[peer], content(seed, peer, cuts[-1]))


@QUEUES
def test_gathers_may_stay_open(world2: WorkerPool, one_queue: bool) -> None:
    world2.run(gathers_left_open, one_queue)


def two_groups(one_queue: bool) -> None:
    """Pairs of ranks, crossed: each rank is in two groups, whose calls interleave."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = [group for group in pairs if rank in dist.get_process_group_ranks(group)]
    links = [link(one_queue, group) for group in mine]
    for seed in range(6):
        theirs = torch.zeros(2, 8000, dtype=torch.uint8)
        opened = links[0].gather("all_gather", content(seed, links[0].rank, 8000), theirs, [0, 8000])
        opened.enqueue()
        gather(links[1], seed, [0, 100, 9000])
        exchange(links[1], seed, [0, 7000])
        opened.wait()
        peer = 1 - links[0].rank
        assert torch.equal(theirs[peer], content(seed, peer, 8000))
    for group in mine:
        dist.destroy_process_group(group)


@QUEUES
def test_two_groups_at_once(world4: WorkerPool, one_queue: bool) -> None:
    world4.run(two_groups, one_queue)


def files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("megatron_flux_host_")}


def links_come_and_go() -> None:
    for seed in range(5):
        at = link(seed % 2 == 0)
        gather(at, seed, [0, 5000])
        del at
        gc.collect()
    assert not files()
    dist.barrier()


def test_nothing_is_left_of_links(world2: WorkerPool) -> None:
    world2.run(links_come_and_go)


def never_comes(one_queue: bool, what: str) -> str:
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "2"
    try:
        at = link(one_queue)
        gather(at, 0, [0, 5000])
        if at.rank == 1:
            dist.barrier()
            return ""
        with pytest.raises(OperatorError) as caught:
            (gather if what == "gather" else exchange)(at, 1, [0, 9000])
        again = pytest.raises(OperatorError, match="timed out")
        with again:
            gather(at, 2, [0, 10])
        dist.barrier()
        return str(caught.value)
    finally:
        del os.environ["MEGATRON_FLUX_TIMEOUT_S"]


@QUEUES
@pytest.mark.parametrize("what", ["gather", "exchange"])
def test_a_wait_that_lasts_too_long_says_for_whom(world2: WorkerPool, one_queue: bool, what: str) -> None:
    said = world2.run(never_comes, one_queue, what)[0]
    operator = {"gather": "all_gather_gemm", "exchange": "gemm_reduce_scatter"}[what]
    for part in (
        f"rank 0 (tp rank 0 of 2): {operator} timed out after 2 s waiting for peer rank 1 (tp rank 1), shard ",
        ", epoch 2; the peer's last epoch here is 1",
    ):
        assert part in said, said


def broken_off_in_between() -> None:
    at = link(True)

    def breaks() -> None:
        with unbroken(at, "gemm_reduce_scatter"):
            at.exchange("gemm_reduce_scatter", torch.zeros(2, 10, dtype=torch.uint8), [0, 10])
            raise KeyError("a kernel that cannot be compiled")

    with pytest.raises(KeyError):
        breaks()
    with pytest.raises(OperatorError, match="a call of gemm_reduce_scatter was broken off here by KeyError"):
        gather(at, 0, [0, 10])


def test_a_call_that_was_broken_off_is_the_last(world2: WorkerPool) -> None:
    world2.run(broken_off_in_between)


def in_folder(folder: Path) -> str:
    with mock.patch.object(host_memory, "FOLDER", folder), pytest.raises(UserError) as caught:
        link(True)
    return str(caught.value)


def test_too_little_shared_memory(world2: WorkerPool, tmp_path: Path) -> None:
    needed = -(-layout(2).total_bytes // 2**20)
    with small_disk(tmp_path / "shm", 0.03) as folder:
        for said in world2.run(in_folder, folder):
            assert f"needs {needed} MiB of shared memory for 2 ranks, and {folder} has 0 MiB left of 0" in said
            assert f"--shm-size={needed + 64}m" in said
            assert "\n" not in said
        assert not list(folder.iterdir())


def allocation_fails() -> str:
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device"))
    if dist.get_rank() == 1:
        full.start()
    try:
        with pytest.raises(UserError) as caught:
            link(True)
    finally:
        mock.patch.stopall()
    gather(link(True), 0, [0, 3000])
    return str(caught.value)


def test_memory_that_others_took_meanwhile(world2: WorkerPool) -> None:
    for said in world2.run(allocation_fails):
        assert "of /dev/shm failed (tp rank 1: OSError: [Errno 28] No space left on device): give the" in said
    assert not files()


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(3)
    yield pool
    pool.stop()


def killed(one_queue: bool, when: str) -> str:
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "2"
    at = link(one_queue)
    gather(at, 0, [0, 5000])
    if at.rank == 2 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    call = at.exchange("gemm_reduce_scatter", torch.zeros(3, 40_000, dtype=torch.uint8), [0, 20_000, 40_000])
    try:
        for number, _ in enumerate(call.steps):
            if at.rank == 2 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            call.send(torch.zeros(20_000, dtype=torch.uint8))
        call.wait()
    except OperatorError as error:
        return str(error)
    return "nothing was said"


@QUEUES
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_killed_rank_ends_the_others_and_leaves_nothing(pool: WorkerPool, one_queue: bool, when: str) -> None:
    began = time.monotonic()
    outcomes = pool.outcomes(killed, one_queue, when)
    assert time.monotonic() - began < 40
    assert outcomes[2].error == "the process ended with exit code -9"
    for rank in (0, 1):
        assert outcomes[rank].error is None, outcomes[rank].error
        assert "gemm_reduce_scatter timed out after 2 s waiting for peer rank" in outcomes[rank].value
    assert any("waiting for peer rank 2 " in outcomes[rank].value for rank in (0, 1))
    assert not files()
