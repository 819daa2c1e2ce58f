"""The first call of a group visits few files of the package, on the CPU twin: from the operator to the kernel."""

import torch
import torch.distributed as dist

from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, integers, registered
from tests.unit.ops.test_call_path import visited

pytestmark = NEEDS_TRITON


@on_ranks("world2")
def test_the_first_all_gather_gemm_visits_few_files() -> None:
    from megatron_flux import ops
    from megatron_flux.comm import group_state

    x, w = integers(16, 32, torch.float16), integers(32, 32, torch.float16)
    group = dist.new_group([0, 1])
    with registered(KernelConfig(**TINY)):
        ops.all_gather_gemm(x, w, dist.group.WORLD, backend="twin")  # everything is imported
        files = visited(lambda: ops.all_gather_gemm(x, w, group, backend="twin"))
    group_state.drop_slabs()
    dist.destroy_process_group(group)
    assert "kernel" in files, "the kernel itself"
    assert len(files) <= 21, files
