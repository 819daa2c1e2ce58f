"""Symmetric memory: no multicast, and signal pads that other libraries use, too."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import OperatorError
from megatron_flux.comm import group_state, shared_memory
from megatron_flux.ops.call import OperatorCall
from megatron_flux.run import rank
from tests.distributed.data import integers
from tests.distributed.pool import WorkerPool, on_ranks

# Multicast and signal pads: GPUs' way to symmetric memory, over memory that CPUs share


class Shared:
    """``torch.distributed._symmetric_memory`` of GPUs without NVLink multicast. Its handles have what flux may use."""

    pads: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def empty(nbytes: int, **_: Any) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def rendezvous(self, whole: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        memory = shared_memory.host_tensors(group, whole.numel() + 2048)
        pad = memory[group.rank()][whole.numel() :]
        pad.fill_(0xA5)  # as another library left it in the middle of a barrier of its own
        self.pads += (pad,)
        dist.barrier(group=group)
        return SimpleNamespace(multicast_ptr=0, get_buffer=lambda r, shape, dtype: memory[r][: shape[0]])


@contextmanager
def symmetric_memory(made: Any) -> Iterator[None]:
    """``made`` in its place, and multicast as a user finds it."""
    name = "torch.distributed._symmetric_memory"
    with (
        mock.patch.dict(sys.modules, {name: made}),
        mock.patch.object(torch.distributed, "_symmetric_memory", made, create=True),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop("TORCH_SYMM_MEM_DISABLE_MULTICAST", None)
        yield


@on_ranks("world4")
def test_two_groups_and_another_librarys_signal_pad() -> None:
    """pytorch/pytorch#192581: a signal of one group ends another's wait; flux has flags of its own in every slab."""
    from tests.distributed.twins import PLANS, twin

    me, shared = dist.get_rank(), Shared()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    mine = [group for group in pairs if me in dist.get_process_group_ranks(group)]
    backend = twin()
    backend.config = PLANS["halves of tiles"]
    with symmetric_memory(shared), mock.patch.object(shared_memory, "allocate", shared_memory.symmetric):
        for seed in range(2):
            x = integers(16, 32, seed=10 * seed + me, dtype=torch.float16)
            pending = OperatorCall("all_gather", x, None, mine[0]).run(backend)
            w = integers(16, 32, seed=3, high=1, dtype=torch.float16)
            y, full = OperatorCall("all_gather_gemm", x, w, mine[1]).run(backend)
            other = dist.get_process_group_ranks(mine[1])
            want = torch.cat([integers(16, 32, seed=10 * seed + r, dtype=torch.float16) for r in other])
            assert torch.equal(full, want)
            assert torch.equal(y.float(), want.float() @ w.float().t())
            first = dist.get_process_group_ranks(mine[0])
            want = torch.cat([integers(16, 32, seed=10 * seed + r, dtype=torch.float16) for r in first])
            assert torch.equal(pending.wait(), want)
        assert all((pad == 0xA5).all() for pad in shared.pads)
        dist.barrier()
    for group in mine:
        dist.destroy_process_group(group)
    group_state.drop_slabs()
    assert len(shared.pads) == 2


def what_is_said(multicast: int, error: Exception | None) -> str:
    def rendezvous(whole: torch.Tensor, group: Any) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(multicast_ptr=multicast)

    made = SimpleNamespace(empty=Shared.empty, rendezvous=rendezvous)
    with symmetric_memory(made), pytest.raises(OperatorError) as caught:
        shared_memory.symmetric(dist.group.WORLD, 4 << 20, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_multicast_that_is_there_all_the_same_is_refused_with_what_to_set(world2: WorkerPool) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#650, NVIDIA/TransformerEngine#985: asserts about CUDA multicast, UB_SKIPMC=1."""
    for said in world2.run(what_is_said, 1 << 40, None):
        assert "set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before torch.distributed is imported" in said
    with mock.patch.dict(os.environ, UB_SKIPMC="0"):
        os.environ.pop("NCCL_NVLS_ENABLE", None)
        rank.set_environment()
        assert (os.environ["UB_SKIPMC"], os.environ["NCCL_NVLS_ENABLE"]) == ("0", "0"), "the user's own stays"


def test_symmetric_memory_that_cannot_be_shared_says_between_whom_and_what_to_do(world2: WorkerPool) -> None:
    """pytorch/pytorch#174030, #167537: "invalid device ordinal", "system not yet initialized" and nothing else."""
    for said in world2.run(what_is_said, 0, RuntimeError("CUDA driver error:\ninvalid device ordinal")):
        assert said.startswith("sharing 4 MiB of GPU memory among ranks [0, 1] (mapping) failed (tp rank 0: ")
        assert "invalid device ordinal; tp rank 1: " in said
        assert said.endswith("MEGATRON_FLUX_LINK=none does without")
