"""The chunked backends on GPUs, by all ways: every check of ``checks_host.py``, and what a dead rank does to others."""

from __future__ import annotations

import os
import time

import pytest

from tests.gpu.test_fused import GPUS, TIMEOUT_S, TUNES, run_checks, start

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs of one host, {GPUS} visible")]

VICTIM = """
import os, torch, torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["MEGATRON_FLUX_LINK"] = "LINK_ASKED_FOR"
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
from megatron_flux import ops
x = torch.randn(size * 1024, 4096, device="cuda", dtype=torch.bfloat16)
w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(CALLS):
    ops.gemm_reduce_scatter(x, w, dist.group.WORLD, backend="chunked")
torch.cuda.synchronize()
dist.barrier()
torch.cuda.synchronize()
if rank == size - 1:
    os.kill(os.getpid(), 9)
ops.gemm_reduce_scatter(x, w, dist.group.WORLD, backend="chunked")
torch.cuda.synchronize()
print("still alive")
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("queues", ["1", "8"])
@pytest.mark.parametrize("way", ["host", "p2p"])
def test_checks(way: str, queues: str) -> None:
    size = next(n for n in (8, 4, 2) if n <= GPUS)
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "MEGATRON_FLUX_TIMEOUT_S": "60", **TUNES}
    run_checks("checks_host.py", size, "--way", way, **variables)


@pytest.mark.parametrize("disk", ["", "full"])
@pytest.mark.parametrize(("link", "calls"), [("host", 2), ("host", 20), ("p2p", 2)])
def test_a_dead_rank_ends_the_others_and_leaves_nothing(link: str, calls: int, disk: str) -> None:
    """Of 20 calls the later ones are replayed."""
    began = time.monotonic()
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)" if disk else ""
    survivor, victim = start(full + VICTIM.replace("LINK_ASKED_FOR", link).replace("CALLS", str(calls)))
    said = "".join(part or "" for part in survivor.communicate(timeout=120))
    victim.communicate()
    assert victim.returncode == -9
    assert survivor.returncode not in (0, None)
    assert time.monotonic() - began < 60 + TIMEOUT_S
    expected = f"gemm_reduce_scatter timed out after {TIMEOUT_S} s waiting for peer rank 1 (tp rank 1), shard "
    assert said.count(expected) == (0 if disk else 1), said
    assert "still alive" not in said
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("megatron_flux_host_")]
