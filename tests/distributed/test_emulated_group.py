"""Two processes that emulate a tensor-parallel group of four or eight: sums, kernels, refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.errors import UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import WorkerPool

TINY: dict[str, Any] = {"bm": 16, "bn": 32, "bk": 16}


def opened(size: int) -> Any:
    from tests.gpu import emulated_group

    return emulated_group.opened(dist.group.WORLD, size, torch.device("cpu"))


def collectives(size: int) -> None:
    from megatron_flux.comm import collectives

    group, me = opened(size), dist.get_rank()
    assert (group.size(), group.rank(), dist.get_world_size(group), dist.get_rank(group)) == (size, 0, size, 0)
    x = torch.arange(6.0).view(2, 3) + 100 * me
    got = collectives.all_gather(x, group).wait()
    assert torch.equal(got[:2], x)
    for source in range(1, size):
        assert torch.equal(got[2 * source : 2 * source + 2], x + 100 * (1 - 2 * me))
    y = torch.arange(2.0 * size).view(2 * size, 1) * (1 + me)
    z = collectives.reduce_scatter(y, group).wait()
    other = (torch.arange(2.0 * size).view(size, 2, 1) * (2 - me))[1:].sum(0)
    assert torch.equal(z, y[:2] + other)
    words = [""] * size
    dist.all_gather_object(words, f"rank {me}", group=group)
    assert words == [f"rank {me}"] + [f"rank {1 - me}"] * (size - 1)
    number = torch.tensor([me])
    dist.broadcast(number, group=group, group_src=0)
    assert number.item() == 0
    largest = torch.tensor([me])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert largest.item() == 1
    with pytest.raises(UserError, match="largest or smallest"):
        dist.all_reduce(largest, group=group)


def profiled(out: Path) -> None:
    from megatron_flux.comm import collectives

    group = opened(4)
    with torch.profiler.profile() as profile:
        collectives.all_gather(torch.ones(2, 3), group).wait()
    trace = out / f"{dist.get_rank()}.json"
    profile.export_chrome_trace(str(trace))
    groups = json.loads(trace.read_text())["distributedInfo"]["pg_config"]
    assert [len(found["ranks"]) for found in groups if found["pg_desc"] == "emulated"][-1] == 4


def test_a_profile_can_be_taken(world2: WorkerPool, tmp_path: Path) -> None:
    world2.run(profiled, tmp_path)


@pytest.mark.parametrize("size", [4, 8])
def test_collectives_are_those_of_one_rank_and_its_peers(world2: WorkerPool, size: int) -> None:
    world2.run(collectives, size)


def operators(size: int) -> None:
    from tests.distributed.test_fused_twin import integers
    from tests.gpu.emulated_fused import EmulatedFused

    group, twin = opened(size), EmulatedFused("emulated twin", twin=True)
    from megatron_flux.ops.backends.reference import ReferenceBackend

    stock = ReferenceBackend()
    torch.manual_seed(dist.get_rank())
    for plan in (KernelConfig(**TINY), KernelConfig(**TINY, split=False, reducers=2)):
        twin.config = plan
        for mp, n, k, transposed in ((32, 32, 48, False), (16, 48, 32, True)):
            w = integers(*((k, n) if transposed else (n, k)), torch.bfloat16)
            x = integers(mp, k, torch.bfloat16)
            y, gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(twin)
            want, want_gathered = OperatorCall("all_gather_gemm", x, w, group, transposed=transposed).run(stock)
            assert torch.equal(gathered, want_gathered)
            assert torch.equal(y, want)
            assert torch.equal(OperatorCall("all_gather", x, None, group).run(twin).wait(), want_gathered)
            x = integers(mp * size, k, torch.bfloat16)
            z = OperatorCall("gemm_reduce_scatter", x, w, group, transposed=transposed).run(twin).wait()
            exact = OperatorCall("gemm_reduce_scatter", x.float(), w.float(), group, transposed=transposed).run(stock)
            assert torch.equal(z, exact.wait().to(z.dtype))
        twin.renew(group)  # the next plan's calls have workspaces of their own
        assert not twin._slabs
    twin.config = None
    with pytest.raises(UserError, match="emulated groups only"):
        OperatorCall("all_gather", x, None, dist.group.WORLD).run(twin)
    group.clear()
    twin.clear()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_kernels_reach_every_place_of_every_source(world2: WorkerPool) -> None:
    world2.run(operators, 8)


def wrong_size() -> None:
    for size in (2, 6, 16):
        with pytest.raises(UserError, match="4 or 8"):
            opened(size)


def test_other_sizes_are_refused(world2: WorkerPool) -> None:
    world2.run(wrong_size)
