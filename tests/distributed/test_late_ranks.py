"""A rank that is late is waited for in every call, by every transport, and beyond the largest epoch, on the CPU twin.

Each call has fresh operands, so that what an earlier call left in a workspace is wrong; what is expected is known
before; the late rank sleeps right before its call, and what the others got is looked at before it wakes up again.
"""

from __future__ import annotations

import gc
import importlib.util
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.ops.checks import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import WorkerPool
from tests.distributed.test_fused_twin import TINY, integers, twin

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

LATE_S = 0.15
PLANS = {
    "halves of tiles": KernelConfig(**TINY),
    "whole tiles": KernelConfig(**TINY, split=False, reducers=2, band=2),
}
DTYPE = torch.float16


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def round_of_calls(backend: Any, group: dist.ProcessGroup, late: int) -> None:
    """All three operators, rank ``late`` of the group behind the others in each."""
    mp, n, k = 32, 32, 32
    x, w, whole = integers(mp, k, DTYPE), integers(n, k, DTYPE), integers(mp * group.size(), k, DTYPE)
    full = gathered(x)
    product = full.float() @ w.float().t()
    sums = whole.float() @ w.float().t()
    dist.all_reduce(sums)
    mine = sums[mp * group.rank() : mp * (group.rank() + 1)]

    def together() -> None:
        dist.barrier()
        if group.rank() == late:
            time.sleep(LATE_S)

    together()
    y, seen = OperatorCall("all_gather_gemm", x, w, group).run(backend)
    found, seen = y.float(), seen.clone()
    assert torch.equal(seen, full), f"rank {late} was late: the gathered input is another"
    assert torch.equal(found, product), f"rank {late} was late: the product is another"
    together()
    z = OperatorCall("gemm_reduce_scatter", whole, w, group).run(backend).wait()
    assert torch.equal(z.float(), mine), f"rank {late} was late: the sum is another"
    together()
    alone = OperatorCall("all_gather", x, None, group).run(backend).wait().clone()
    assert torch.equal(alone, full), f"rank {late} was late: what was gathered by itself is another"


def rank_late(plan: KernelConfig) -> None:
    """Both halves of both workspaces, and each of them again."""
    backend = twin()
    backend.config = plan
    for turn in range(3):
        round_of_calls(backend, dist.group.WORLD, turn % 2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_transport_waits_for_a_late_rank(world2: WorkerPool, plan: KernelConfig) -> None:
    world2.run(rank_late, plan)


def rank_wraps(plan: KernelConfig) -> None:
    """Two rounds before the largest int32, two behind it: what flags hold then is far above the epoch as a number."""
    from megatron_flux.comm import group_state

    backend = twin()
    backend.config = plan
    round_of_calls(backend, dist.group.WORLD, 0)
    top = 2**31 - 2
    dist.barrier()
    for work in group_state.state_of(dist.group.WORLD).slabs.values():
        work.flags[work.rank].fill_(top - 1)
        work.epochs.fill_(top)
    dist.barrier()
    for turn in range(4):
        round_of_calls(backend, dist.group.WORLD, turn % 2)
    eager = {
        name: work for (name, captured), work in group_state.state_of(dist.group.WORLD).slabs.items() if not captured
    }
    assert all((work.epochs < 0).all() for work in eager.values()), "no epoch has wrapped: nothing was tested"
    group_state.drop_slabs()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_epochs_may_wrap_while_a_rank_is_late(world2: WorkerPool, plan: KernelConfig) -> None:
    world2.run(rank_wraps, plan)


def rank_world_made_again(folder: Path) -> None:
    """The world is destroyed and made again, its ranks in another order, as after a failure that a job survives."""
    from megatron_flux.comm import collectives, group_state, links

    backend = twin()
    backend.config = PLANS["halves of tiles"]
    first, rank = dist.group.WORLD, dist.get_rank()
    round_of_calls(backend, first, 0)
    name, state, held = first.group_name, weakref.ref(group_state.state_of(first)), group_state.slab_bytes()
    memory = weakref.ref(group_state.state_of(first).slab("gemm", 1, torch.device("cpu"), False).data[1 - rank])
    assert held > 0
    links.probe(first, torch.device("cpu"))
    collectives.failures(first, None)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=1 - rank, world_size=2)
    second = dist.group.WORLD
    assert second.group_name == name
    assert second is not first
    del first
    gc.collect()
    assert state() is None, "something holds the state of a group that is gone"
    assert memory() is None, "or its memory"
    fresh = group_state.state_of(second)
    assert (fresh.slabs, fresh.link, fresh.compared, fresh.gathers_begun) == ({}, None, set(), 0)
    assert collectives.failures(second, "mine" if rank else None) == {0: "mine"}, "an answer that the first group left"
    for turn in range(2):
        round_of_calls(backend, second, turn)
    assert group_state.slab_bytes() == held


def test_a_group_made_again_under_the_same_name_starts_clean(tmp_path: Path) -> None:
    pool = WorkerPool(2)  # of its own: the other tests' workers keep their world
    try:
        pool.run(rank_world_made_again, tmp_path)
    finally:
        pool.stop()
