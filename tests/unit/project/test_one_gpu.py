"""What tests/gpu/one_gpu does to a Python that begins with it, as far as a machine without a GPU shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ASKED = """
import os, torch, torch.distributed as dist
from megatron_flux.comm import links
counted = torch.cuda.device_count()
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
print(counted, torch.cuda.device_count(), os.environ.get("LOCAL_RANK"), os.environ.get("NCCL_HOSTID"))
print(links._link(dist.group.WORLD, torch.device("cuda", 0)).kind)
"""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"MEGATRON_FLUX_RANKS_ON_GPU": "2"}, ["2 0 None rank 0", "nvlink"]),
        ({"MEGATRON_FLUX_RANKS_ON_GPU": "2", "LOCAL_RANK": "1", "RANK": "1"}, ["0 0 0 rank 0", "nvlink"]),
        ({}, ["0 0 None None"]),
    ],
    ids=["starts ranks", "a rank", "not asked"],
)
def test_ranks_share_a_gpu(environment: dict[str, str], said: list[str]) -> None:
    hidden = ("RANK", "LOCAL_RANK", "NCCL_HOSTID", "MEGATRON_FLUX_RANKS_ON_GPU")
    base = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT / "tests" / "gpu" / "one_gpu"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", ASKED], env={**base, **environment, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.splitlines() == said, done.stderr[-2000:]
    assert (done.returncode == 0) == bool(environment), done.stderr[-2000:]  # without it there is no GPU to ask about
