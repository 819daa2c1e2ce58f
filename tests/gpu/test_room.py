"""Workspaces where a GPU has little memory left: real allocations on two GPUs."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux import ops
from megatron_flux.comm.group_state import drop_slabs, slab_bytes
from megatron_flux.errors import OperatorError
from megatron_flux.layers import backward
from tests.distributed.pool import on_ranks

LEFT = 300 << 20  # bytes that are left free
ROWS, K, N = 8192, 8192, 256  # a workspace of 512 MiB at tp = 2


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(-1, 2, (ROWS, K), device="cuda").bfloat16()
    return x, torch.randint(-1, 2, (N, K), device="cuda").bfloat16()


def fill(result: int) -> torch.Tensor:
    """Take all but LEFT bytes of the GPU, and ``result`` bytes more, by torch's allocator."""
    gc.collect()  # an earlier test's exception may still hold a workspace
    torch.cuda.empty_cache()
    return torch.empty(torch.cuda.mem_get_info()[0] - LEFT - result, dtype=torch.uint8, device="cuda")


def exact(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup) -> bool:
    y = ops.all_gather_gemm(x, w, group, backend="fused")
    whole = torch.empty(2 * ROWS, K, dtype=x.dtype, device="cuda")
    dist.all_gather_into_tensor(whole, x, group=group)
    return torch.equal(y, whole @ w.t())


@pytest.mark.gpus(2)
@on_ranks("nccl2")
def test_torchs_cache_is_given_back() -> None:
    """The workspace does not fit beside torch's cache, which holds nothing that is used."""
    group, (x, w) = dist.new_group([0, 1]), operands()
    hold = fill(0)
    del hold
    assert exact(x, w, group)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("full", [0, 1])
@on_ranks("nccl2")
def test_a_rank_without_room_is_named_and_may_try_again(full: int) -> None:
    group, (x, w) = dist.new_group([0, 1]), operands()
    dist.barrier(group=group)
    hold = fill(4 * ROWS * N) if dist.get_rank() == full else None
    began = time.monotonic()
    with pytest.raises(OperatorError) as told:
        ops.all_gather_gemm(x, w, group, backend="fused")
    took = time.monotonic() - began
    del hold
    torch.cuda.empty_cache()
    said = str(told.value)
    assert "out of memory" in said
    assert f"tp rank {full}:" in said
    assert "fabric" not in said
    assert took < 20
    assert exact(x, w, group), "the call may be tried again"


@pytest.mark.gpus(2)
@on_ranks("nccl2")
def test_released_workspaces_are_the_drivers_at_once_and_come_back() -> None:
    torch.cuda.synchronize()
    dist.barrier()
    drop_slabs()  # other tests' may be poisoned, or in graphs
    backward.release()
    group, (x, w) = dist.new_group([0, 1]), operands()
    for _ in range(3):
        assert exact(x, w, group)
        before, size = torch.cuda.mem_get_info()[0], slab_bytes()
        assert size >= 2 * ROWS * K * 4
        assert megatron_flux.release() == size
        assert torch.cuda.mem_get_info()[0] - before >= 0.95 * size
