"""A peer that is killed: the survivor's operators raise within seconds and say what, where and with whom."""

import os
import re
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux import OperatorError, ops
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from tests.distributed.data import attempt
from tests.distributed.pool import WorkerPool

SECONDS = 20.0
K, N = 4, 6


def calls() -> dict[str, Callable[[], object]]:
    x, weight = torch.ones(8, K), torch.ones(N, K)
    return {
        "gemm_reduce_scatter async": lambda: ops.gemm_reduce_scatter(x, weight, async_op=True).wait(),
        "gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(x, weight),
        "all_gather_gemm": lambda: ops.all_gather_gemm(x, weight),
        "all_gather": lambda: ops.all_gather(x).wait(),
    }


def rank_0_dies() -> dict[str, tuple[str, str, float]]:
    group, weight = dist.group.WORLD, torch.ones(N, K, requires_grad=True)
    column = column_parallel_linear(torch.ones(2, 1, K, requires_grad=True), weight, None, group)
    row = row_parallel_linear(torch.ones(4, 1, K, requires_grad=True), weight, group)
    for call in calls().values():
        call()
    if dist.get_rank() == 0:
        time.sleep(1.0)  # the survivor is inside the first collective by now
        os.kill(os.getpid(), signal.SIGKILL)
    backwards = {
        "all_gather column backward": lambda: column.sum().backward(),
        "all_gather row backward": lambda: row.sum().backward(),
    }
    return {name: attempt(call) for name, call in (calls() | backwards).items()}


def test_a_killed_peer() -> None:
    with WorkerPool(2) as pool:
        dead, survivor = pool.outcomes(rank_0_dies, timeout=2 * SECONDS)
    assert dead.error == "the process ended with exit code -9"
    assert survivor.error is None, survivor.error
    assert survivor.seconds < SECONDS
    attempts = survivor.value
    assert next(iter(attempts.values()))[2] > 0.1, "it did not wait for its peer"
    for name, (error, message, seconds) in attempts.items():
        assert error == OperatorError.__name__, (name, error, message)
        assert seconds < SECONDS, f"{name} waited for the group's time-out"
        collective = "reduce_scatter" if "reduce_scatter" in name else "all_gather"
        assert re.match(rf"rank 1 \(tp rank 1 of 2\): {collective} of \(", message), (name, message)
        assert "with peer rank(s) [0] failed: " in message
        assert "torch.float32 on cpu" in message
        assert "\n" not in message
    assert f"all_gather of {(8, K)}" in attempts["all_gather_gemm"][1]
    assert f"reduce_scatter of {(8, N)}" in attempts["gemm_reduce_scatter"][1]
