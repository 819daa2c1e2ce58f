"""A rank that is late is waited for in every call, by every transport, and beyond the largest epoch. Beside other
process groups fused calls start on all ranks together.
"""

import contextlib
import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_flux import settings
from megatron_flux.comm import agreement, group_state, links
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Beside, Link
from megatron_flux.errors import OperatorError
from megatron_flux.ops import timing
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.device import CPU_CTAS
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import gathered, summed
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.twins import NEEDS_TRITON, PLANS, TINY, integers, one_capture, twin

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


@contextlib.contextmanager
def beside_others() -> Iterator[list[tuple[str, float]]]:
    """Yield names and times of all kernels that are launched, while other groups run beside the world."""
    from megatron_flux.kernels import launch

    group_state.drop_slabs()
    state, launched, by_triton = group_state.state_of(dist.group.WORLD), [], launch.by_triton

    def noted(kernel: Any, *args: Any, **how: Any) -> Any:
        launched.append((kernel.fn.__name__, time.monotonic()))
        return by_triton(kernel, *args, **how)

    with (
        mock.patch.object(state, "beside", Beside(others=True, high_priority=False)),
        mock.patch.object(settings, "one_queue", return_value=False),
        mock.patch.object(launch, "by_triton", noted),
    ):
        yield launched
    group_state.drop_slabs()


def run_all(backend: Any, late: int | None = None) -> float:
    """Run and check all operators; the rank ``late`` comes later to each. Return when this rank came to the first."""
    group = dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(48, 32, torch.float16)
    whole, came = gathered(x, group), []

    def run(operator: str) -> Any:
        dist.barrier()
        if dist.get_rank() == late:
            time.sleep(0.2)
        came.append(time.monotonic())
        return OperatorCall(operator, x, None if operator == "all_gather" else w, group).run(backend)

    y, seen = run("all_gather_gemm")
    assert torch.equal(seen, whole)
    assert torch.equal(y, (whole.float() @ w.float().t()).half())
    partial = x.float() @ w.float().t()
    rows = slice(16 * dist.get_rank(), 16 * dist.get_rank() + 16)
    assert torch.equal(run("gemm_reduce_scatter").wait(), summed(partial, group)[rows].half())
    assert torch.equal(run("gemm_all_reduce").wait(), summed(partial, group).half())
    assert torch.equal(run("all_gather").wait(), whole)
    return came[0]


KERNELS = ["ag_gemm_kernel", "gemm_rs_kernel", "one_shot_kernel", "gather_wait_kernel"]


@pytest.mark.parametrize("late", [0, 1])
@on_ranks("world2")
def test_kernels_that_hold_sms_wait_for_the_last_rank_before_they_start(late: int) -> None:
    with beside_others() as launched:
        came = run_all(twin(KernelConfig(**TINY)), late)
    names = [name for name, _ in launched]
    held, gather = names[:-1], names[-1]
    assert held[::2] == ["start_kernel"] * 3, names
    assert [held[1], held[3], gather] == [KERNELS[0], KERNELS[1], KERNELS[3]]
    assert "shot" in held[5]
    times: list[Any] = [None, None]
    dist.all_gather_object(times, (came, launched[1][1]))
    assert min(started for _, started in times) >= max(came for came, _ in times)


@on_ranks("world2")
def test_in_a_graph_every_call_starts_together() -> None:
    backend, group = twin(KernelConfig(**TINY)), dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(48, 32, torch.float16)
    whole = gathered(x, group)
    with beside_others() as launched:
        for number in (1, 2):
            with one_capture(number):
                for _ in range(2):
                    _, seen = OperatorCall("all_gather_gemm", x, w, group).run(backend)
                    assert torch.equal(seen, whole)
    one_graph = ["enter_kernel", *["start_kernel", "ag_gemm_kernel"] * 2]
    assert [name for name, _ in launched] == one_graph * 2


@on_ranks("world2")
def test_a_rank_that_never_comes_is_named() -> None:
    backend, group = twin(KernelConfig(**TINY)), dist.group.WORLD
    x, w = integers(32, 32, torch.float16), integers(48, 32, torch.float16)
    with beside_others(), mock.patch.dict("os.environ", MEGATRON_FLUX_TIMEOUT_S="1"):
        OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
        if dist.get_rank() == 0:
            with pytest.raises(OperatorError, match=r"the start of a call.*rank 1"):
                OperatorCall("gemm_reduce_scatter", x, w, group).run(backend).wait()
        dist.barrier()


@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_all_reduce"])
@on_ranks("world2")
def test_one_cta_computes_the_tiles_of_those_that_do_not_start(operator: str) -> None:
    """Triton's interpreter runs CTAs one after the other."""
    group, rows = dist.group.WORLD, 64
    x, w = integers(rows, 32, torch.float16), integers(96, 32, torch.float16)
    tiles = KernelConfig(**TINY, reducers=1)  # two CTAs compute
    config: Any = tiles if operator == "gemm_reduce_scatter" else AllReduceConfig(tiles=tiles)
    call, backend = OperatorCall(operator, x, w, group), twin()
    with mock.patch.dict("os.environ", MEGATRON_FLUX_TIMEOUT_S="20"):
        result = backend.plan(call, config).run(call)
    assert CPU_CTAS == 3, "one of three adds"
    want = summed(x.float() @ w.float().t(), group).half()
    if operator == "gemm_reduce_scatter":
        want = want[rows // 2 * dist.get_rank() :][: rows // 2]
    assert torch.equal(result, want)


def asked_anew(group: dist.ProcessGroup) -> Beside:
    state = state_of(group)
    state.beside = None
    try:
        return links.beside(group)
    finally:
        state.beside = None


def asked(group: dist.ProcessGroup, left: Iterable[dist.ProcessGroup], **variables: str) -> Beside:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_on_nccl", lambda other: other not in left)
        for name, value in variables.items():
            patch.setenv(name, value)
        return asked_anew(group)


@on_ranks("world")
def test_megatron_waits_for_its_groups_over_the_same_ranks() -> None:
    """Data parallelism is over others."""
    from megatron.core import parallel_state

    left = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}  # by other tests
    with megatron(tp=2):
        group = parallel_state.get_tensor_model_parallel_group()
        plain, high = asked(group, left), asked(group, left, TORCH_NCCL_HIGH_PRIORITY="1")
    others = dist.get_world_size() > 2
    assert plain.others == others
    assert others or (plain.high_priority, high) == (False, Beside(others=False, high_priority=True))


@on_ranks("world")
def test_another_group_counts_on_all_ranks() -> None:
    """On those that are not in it, too: ranks that decided by what they see themselves would run different backends."""
    made = dist.new_group([0, 1])
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Other tests leave groups of Megatron's.
            patch.setattr(links, "_on_nccl", lambda other: other is made)
            assert asked_anew(dist.group.WORLD).others
            assert links.seen(dist.group.WORLD).others == (dist.get_rank() < 2)
    finally:
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)


SLOW_MS = 30
CPU = torch.device("cpu")


@on_ranks("world2")
def test_all_agree_only_if_every_rank_does() -> None:
    answers = (True, True), (True, False), (False, True), (False, False)
    for answer in answers:
        assert timing.all_agree(answer[dist.get_rank()], dist.group.WORLD) == all(answer)


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks("world2")
def test_bursts_and_rounds_take_as_long_as_on_the_slowest_rank(slow: int) -> None:
    from megatron_flux.bench.harness import Ranks, Variant, measure

    group = dist.group.WORLD

    def step() -> None:
        time.sleep(SLOW_MS / 1e3 if dist.get_rank() == slow else 0)

    once = timing.burst(step, 1, group, CPU, warm=0)
    here = Ranks(CPU, group, group, Link("none", ""), print)
    samples = measure([Variant("step", step)], here, rounds=2, burst=1)["step"]
    ms = [once, *timing.rounds({"step": step}, group, CPU, 2, 1)["step"].ms, *samples["step_ms"], *samples["host_ms"]]
    assert len(ms) == 1 + 2 + 4
    both: list[Any] = [None, None]
    dist.all_gather_object(both, ms)
    assert both[0] == both[1]
    assert min(ms) >= SLOW_MS
