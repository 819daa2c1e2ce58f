"""The first call of a group visits few files of the package, on the CPU twin: from the operator to the kernel."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import WorkerPool
from tests.distributed.test_fused_twin import TINY, integers, twin
from tests.unit.ops.test_call_path import visited

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def rank_cold() -> list[str]:
    from megatron_flux import ops
    from megatron_flux.comm import group_state
    from megatron_flux.ops.backends import registry

    backend = twin()
    backend.config = KernelConfig(**TINY)
    x, w = integers(16, 32, torch.float16), integers(32, 32, torch.float16)
    group = dist.new_group([0, 1])
    registry._backends["twin"] = backend
    try:
        ops.all_gather_gemm(x, w, dist.group.WORLD, backend="twin")  # everything is imported
        return visited(lambda: ops.all_gather_gemm(x, w, group, backend="twin"))
    finally:
        del registry._backends["twin"]
        group_state.drop_slabs()
        dist.destroy_process_group(group)


def test_the_first_all_gather_gemm_visits_few_files(world2: WorkerPool) -> None:
    for files in world2.run(rank_cold):
        assert "kernel" in files, "the kernel itself"
        assert len(files) <= 21, files
