"""The worker pool that the distributed tests stand on: results, errors, time-outs, deaths, nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed import pool as pool_module
from tests.distributed.pool import RankError, WorkerPool

pytestmark = pytest.mark.distributed


def sum_of_ranks(offset: int) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LookupError("the words of the failure")
    dist.barrier()


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep_for_ever() -> None:
    time.sleep(3600)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.stop()


def test_nothing_is_started_before_the_first_call_and_results_come_in_rank_order(pool: WorkerPool) -> None:
    assert pool.pids == []
    assert pool.run(sum_of_ranks, 10) == [(0, 2, 21), (1, 2, 21)]
    first = pool.pids
    assert pool.run(sum_of_ranks, 1) == [(0, 2, 3), (1, 2, 3)]
    assert pool.pids == first


def test_a_rank_error_carries_rank_and_traceback_and_the_pool_recovers(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "GRACE_AFTER_FAILURE", 0.5)
    with pytest.raises(RankError) as error:
        pool.run(fail_on, 1)
    assert "[rank 1 of 2] Traceback" in str(error.value)
    assert "LookupError: the words of the failure" in str(error.value)
    assert "in fail_on" in str(error.value)
    assert pool.pids == []
    assert pool.run(sum_of_ranks, 0)[0] == (0, 2, 1)


def test_a_hang_ends_with_the_time_out_and_leaves_no_process(pool: WorkerPool) -> None:
    pool.run(sum_of_ranks, 0)
    pids = pool.pids
    began = time.monotonic()
    with pytest.raises(RankError, match="did not answer in time"):
        pool.run(sleep_for_ever, timeout=0.5)
    assert time.monotonic() - began < 10
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_death_is_reported_with_its_exit_code_beside_the_others_results(pool: WorkerPool) -> None:
    outcomes = pool.outcomes(die_on, 1)
    assert outcomes[0].value == "alive"
    assert outcomes[1].error == "the process ended with exit code -9"
