"""Which of several failed ranks is named."""

from __future__ import annotations

import signal

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_flux.errors import UserError
from megatron_flux.run.launcher import failure_of


def failed(codes: dict[int, int], times: dict[int, int] | None = None) -> str:
    failures = {}
    for rank, code in codes.items():
        failure = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        failure.timestamp = (times or {}).get(rank, 0)
        failures[rank] = failure
    error = failure_of(ChildFailedError("worker", failures), "what was recorded is in runs/x")
    assert isinstance(error, UserError) == (2 in codes.values())
    return str(error)


def test_the_first_failure_is_named() -> None:
    assert failed({0: 1, 1: 1}, {0: 20, 1: 10}).startswith("rank 1 failed")


def test_a_killed_rank_comes_before_those_that_missed_it() -> None:
    said = failed({0: 1, 1: -signal.SIGKILL}, {0: 10, 1: 20})
    assert said.startswith("rank 1 was killed by SIGKILL (exit code -9)")
    assert "runs/x" in said


def test_ranks_that_the_launcher_ended_come_last() -> None:
    assert failed({0: -signal.SIGTERM, 1: 1}, {0: 10, 1: 20}).startswith("rank 1 failed")


def test_a_refusal_stays_a_refusal() -> None:
    failed({0: 2, 1: 2})
