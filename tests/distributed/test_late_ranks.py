"""A rank that is late is waited for in every call, by every transport, and beyond the largest epoch."""

import contextlib
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm import agreement, group_state, links
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import gathered, summed
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, PLANS, integers, one_capture, twin

pytestmark = NEEDS_TRITON

LATE_S = 0.08
DTYPE = torch.float16


def round_of_calls(backend: Any, group: dist.ProcessGroup, late: int | None = None) -> None:
    """All three operators, rank ``late`` of the group behind the others in each."""
    mp, n, k = 32, 32, 32
    x, w, whole = integers(mp, k, DTYPE), integers(n, k, DTYPE), integers(mp * group.size(), k, DTYPE)
    full = gathered(x)
    product = full.float() @ w.float().t()
    mine = summed(whole.float() @ w.float().t())[mp * group.rank() : mp * (group.rank() + 1)]

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


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@on_ranks("world2")
def test_every_transport_waits_for_a_late_rank(plan: KernelConfig) -> None:
    """Both halves of both workspaces, and each of them again."""
    backend = twin(plan)
    for repeat in range(3):
        round_of_calls(backend, dist.group.WORLD, repeat % 2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@on_ranks("world2")
def test_a_late_rank_is_waited_for_however_many_calls_there_were(plan: KernelConfig) -> None:
    """After so many calls, flags that were never written are as far ahead of an epoch as behind it."""
    group_state.drop_slabs()  # of tests before
    backend, group, capture = twin(plan), dist.group.WORLD, iter(range(1, 10))

    def rounds(captured: bool, late: tuple[int | None, ...]) -> None:
        with one_capture(next(capture)) if captured else contextlib.nullcontext():
            for rank in late:
                round_of_calls(backend, group, rank)

    def made(captured: bool) -> dict[str, Any]:
        return {name: work for (name, kind), work in group_state.state_of(group).slabs.items() if kind is captured}

    for captured, calls, written in ((False, 2**31 + 100, 0), (True, 2**31 + 100, 0), (True, 2**31 - 2, 2**31 - 2)):
        rounds(captured, (None, None))
        before = made(captured)
        dist.barrier()
        for work in before.values():
            epoch = int(np.int64(calls + 1).astype(np.int32))
            work.calls = work.calls if captured else calls
            work.epochs.fill_(epoch)
            work.flags[work.rank].fill_(written)
            work.flags[work.rank][: work.tp].fill_(epoch - 1)  # each capture's first call writes these
            # The barrier behind which flags are written anew, and when that was last: 2^30 epochs ago at most.
            last = int(np.int64(epoch - 2**30 - 5).astype(np.int32))
            work.flags[work.rank][work.tp : 2 * work.tp + 1].fill_(last)
        dist.barrier()
        rounds(captured, (0, 1))
        if captured:
            assert all((work.epochs < 0).all() for work in before.values()), "no epoch has wrapped: nothing was tested"
        else:
            assert {name: work.calls for name, work in made(False).items()} == {"gemm": 4, "gather": 2}
        group_state.drop_slabs()


def rank_world_made_again(folder: Path) -> None:
    """The world is destroyed and made again, its ranks in another order, as after a failure that a job survives."""
    backend = twin(PLANS["halves of tiles"])
    first, rank = dist.group.WORLD, dist.get_rank()
    round_of_calls(backend, first, 0)
    name, state, held = first.group_name, weakref.ref(group_state.state_of(first)), group_state.slab_bytes()
    memory = weakref.ref(group_state.state_of(first).slab("gemm", 1, torch.device("cpu"), False).data[1 - rank])
    assert held > 0
    links.probe(first, torch.device("cpu"))
    agreement.failures(first, "a try", None)
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
    assert (fresh.slabs, fresh.link, fresh.compared, fresh.gathers_begun) == ({}, None, {}, 0)
    assert agreement.failures(second, "a try", "mine" if rank else None) == {0: "mine"}, (
        "an answer that the first group left"
    )
    for repeat in range(2):
        round_of_calls(backend, second, repeat)
    assert group_state.slab_bytes() == held


def test_a_group_made_again_under_the_same_name_starts_clean(tmp_path: Path) -> None:
    with WorkerPool(2) as pool:  # of its own: the other tests' workers keep their world
        pool.run(rank_world_made_again, tmp_path)
