"""The fused backend on real GPUs: every check of ``checks.py`` under torchrun, and what a dead rank does to the
others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import free_port

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()
TIMEOUT_S = 6

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs of one host, {GPUS} visible")]

VICTIM = """
import os, torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
from megatron_flux import ops
x = torch.randn(size * ROWS, K, device="cuda", dtype=torch.bfloat16)
w = torch.randn(K, K, device="cuda", dtype=torch.bfloat16)
for _ in range(CALLS):
    ops.gemm_reduce_scatter(x, w, dist.group.WORLD, backend="BACKEND")
torch.cuda.synchronize()
dist.barrier()
torch.cuda.synchronize()
if rank == size - 1:
    os.kill(os.getpid(), 9)
ops.gemm_reduce_scatter(x, w, dist.group.WORLD, backend="BACKEND")
torch.cuda.synchronize()
print("still alive")
os._exit(0)
"""

HALF_A_CALL = """
import os, torch, torch.distributed as dist
from unittest import mock
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
from megatron_flux import ops
from megatron_flux.errors import OperatorError
from megatron_flux import cuda_driver as driver
from megatron_flux.ops.cuda_graphs import captured_calls
x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
w = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
with captured_calls():
    for _ in range(3):
        ops.gemm_reduce_scatter(x, w, dist.group.WORLD, backend="fused")
torch.cuda.synchronize()
dist.barrier()
launches = [driver.launch, mock.Mock(side_effect=OperatorError("no launch, for a test"))]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph), mock.patch.object(driver, "launch", lambda *given: launches.pop(0)(*given)):
    try:
        ops.gemm_reduce_scatter(x, w, dist.group.WORLD, backend="fused")
    except OperatorError as error:
        print("caught:", error, flush=True)
print("captured", flush=True)
graph.replay()
torch.cuda.synchronize()
print("still alive", flush=True)
os._exit(0)
"""


def environment() -> dict[str, str]:
    root = str(HERE.parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "MEGATRON_FLUX_TIMEOUT_S": str(TIMEOUT_S),
    }


def run_checks(program: str, size: int, *arguments: str, **variables: str) -> dict[str, str]:
    """Run a program of checks on ``size`` ranks; what every check said, by name."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command = [*torchrun, str(HERE / program), *arguments]
    done = subprocess.run(command, env={**environment(), **variables}, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert lines
    assert all(line["ok"] for line in lines)
    return {line["check"]: line["said"] for line in lines}


TUNES = {"MEGATRON_FLUX_TUNE": "on"}
"""For checks of the tuner, whatever all tests are told."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("groups", [1, 2])
def test_checks(groups: int, part: int) -> None:
    size = next(n for n in (8, 4, 2) if n <= GPUS)
    if size // groups < 2:
        pytest.skip(f"needs {2 * groups} GPUs for {groups} groups")
    run_checks("checks.py", size, "--split", str(groups), "--part", f"{part}/4", CUDA_DEVICE_MAX_CONNECTIONS="1")


def test_gathers_cross_streams() -> None:
    run_checks("checks.py", 2, "--only", "across_streams")


@pytest.mark.parametrize("queues", ["1", "8", "32"])
@pytest.mark.parametrize("groups", [1, 2])
def test_beside_nccl_of_another_group(groups: int, queues: str) -> None:
    """Random delays on every rank; a check that stands still ends itself."""
    size = next(n for n in (4, 2) if n <= GPUS)
    if size // groups < 2:
        pytest.skip(f"needs {2 * groups} GPUs for {groups} groups")
    split = ("--split", str(groups))
    # By itself first: nothing has launched the kernels outside of captured calls then.
    run_checks("checks.py", size, *split, "--only", "nccl_beside_graphs", CUDA_DEVICE_MAX_CONNECTIONS=queues)
    checks = (*split, "--only", "graphs,nccl_beside,nccl_beside_graphs")
    said = run_checks("checks.py", size, *checks, CUDA_DEVICE_MAX_CONNECTIONS=queues)
    assert "rounds" in said["nccl_beside"]
    assert "rounds" in said["nccl_beside_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_checks_of_two_that_emulate_more(size: int) -> None:
    run_checks("checks.py", 2, "--emulate", str(size), "--rounds", "10")


def victim(backend: str, calls: int, rows: int, k: int) -> str:
    """A script of which the last rank ends behind ``calls``."""
    constants = f"ROWS, K, CALLS = {rows}, {k}, {calls}\n"
    return constants + VICTIM.replace("BACKEND", backend)


def start(script: str, **variables: str) -> list[subprocess.Popen[str]]:
    """Two ranks of it."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    base = {**environment(), **address, **variables}
    return [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def test_killed_rank_ends_the_others_in_time() -> None:
    ranks = start(victim("fused", 1, 128, 256))
    ranks[1].wait(120)
    died = time.monotonic()
    said, _ = ranks[0].communicate(timeout=TIMEOUT_S + 60)
    took = time.monotonic() - died
    assert ranks[0].returncode != 0
    assert "still alive" not in said
    for part in ("gemm_reduce_scatter timed out", "peer rank 1", "tile", "epoch 2"):
        assert part in said, said[-2000:]
    assert took < TIMEOUT_S + 30, f"{took:.0f} s"


@pytest.mark.skipif(GPUS and torch.cuda.get_device_capability() != (9, 0), reason="no Hopper")
def test_a_graph_of_half_a_call_is_not_replayed() -> None:
    for rank in start(HALF_A_CALL):
        said, _ = rank.communicate(timeout=180)
        assert "caught: no launch, for a test" in said, said[-2000:]
        assert "captured\n" in said, said[-2000:]
        assert "still alive" not in said
        assert "gemm_reduce_scatter was broken off by OperatorError while this CUDA graph was captured" in said
        assert rank.returncode != 0
