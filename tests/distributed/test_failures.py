"""A peer that is killed: the survivor's operators raise within seconds and say what, where and with whom."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_flux import OperatorError, ops
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from tests.distributed.data import attempt
from tests.distributed.pool import WorkerPool

SECONDS = 20.0
K, N = 4, 6


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as pool:
        yield pool


def calls() -> dict[str, Callable[[], object]]:
    x, weight, transposed = torch.ones(8, K), torch.ones(N, K), torch.ones(K, N)
    return {
        "all_gather_gemm": lambda: ops.all_gather_gemm(x, weight),
        "all_gather_gemm transposed": lambda: ops.all_gather_gemm(x, transposed, transposed=True),
        "gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(x, weight),
        "gemm_reduce_scatter async": lambda: ops.gemm_reduce_scatter(x, weight, async_op=True).wait(),
        "all_gather": lambda: ops.all_gather(x).wait(),
    }


def die_while_awaited(victim: int, first: str) -> dict[str, tuple[str, str, float]]:
    group = dist.group.WORLD
    weight = torch.ones(N, K, requires_grad=True)
    column = column_parallel_linear(torch.ones(2, 1, K, requires_grad=True), weight, None, group)
    row = row_parallel_linear(torch.ones(4, 1, K, requires_grad=True), weight, group)
    for call in calls().values():
        call()
    if dist.get_rank() == victim:
        time.sleep(1.0)  # the survivor is inside the collective by now
        os.kill(os.getpid(), signal.SIGKILL)
    attempts = {"first": attempt(calls()[first])}
    attempts.update({name: attempt(call) for name, call in calls().items()})
    attempts["column backward"] = attempt(lambda: column.sum().backward())
    attempts["row backward"] = attempt(lambda: row.sum().backward())
    return attempts


def test_a_killed_peer(pool: WorkerPool) -> None:
    victim, first = 0, "gemm_reduce_scatter async"
    outcomes = pool.outcomes(die_while_awaited, victim, first, timeout=2 * SECONDS)
    survivor = 1 - victim
    assert outcomes[victim].error == "the process ended with exit code -9"
    assert outcomes[survivor].error is None, outcomes[survivor].error
    assert outcomes[survivor].seconds < SECONDS
    attempts = outcomes[survivor].value
    assert 0.5 < attempts["first"][2] < SECONDS  # it did wait for the peer, and not for the group's time-out
    for name, (error, message, seconds) in attempts.items():
        assert error == OperatorError.__name__, (name, error, message)
        assert seconds < SECONDS, name
        collective = "reduce_scatter" if "reduce_scatter" in (first if name == "first" else name) else "all_gather"
        assert re.match(rf"rank {survivor} \(tp rank {survivor} of 2\): {collective} of \(", message), (name, message)
        assert f"with peer rank(s) [{victim}] failed: " in message
        assert "torch.float32 on cpu" in message
        assert "\n" not in message
    assert f"all_gather of {(8, K)}" in attempts["all_gather_gemm"][1]
    assert f"reduce_scatter of {(8, N)}" in attempts["gemm_reduce_scatter"][1]
