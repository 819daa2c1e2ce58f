"""release(): memory of workspaces, slots and kept inputs goes between steps, and is there again at the next call. All
goes with its group.
"""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux import UserError, ops
from megatron_flux.comm.group_state import all_states, drop_slabs, slab_bytes, state_of
from megatron_flux.layers import backward, column_parallel_linear, keep
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.backends.registry import _tuned
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends
from megatron_flux.ops.tuner.trial import Trial, TrialPlan
from tests.distributed import test_ops
from tests.distributed.pool import on_ranks
from tests.distributed.test_keep_gathered import Block, gathered_bytes, held, one_input, require_equal
from tests.distributed.twins import NEEDS_TRITON, TINY, one_capture, registered

CPU = torch.device("cpu")
GATHER = "an all_gather was begun and not waited for"


def start_anew() -> None:
    """Forget what other tests have left, poisoned or captured."""
    dist.barrier()
    drop_slabs()
    backward.release()
    for state in all_states():
        state.transports.clear()
        state.forget_calls()


def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Calls on all slabs of a group."""
    x = torch.full((16, 32), float(1 + group.rank())).half()
    w = (torch.arange(32 * 32).view(32, 32) % 5 - 2).half()
    y, gathered = ops.all_gather_gemm(x, w, group, backend="twin", return_gathered=True)
    return [
        y,
        gathered.clone(),
        ops.gemm_reduce_scatter(gathered.clone(), w, group, backend="twin"),
        ops.gemm_all_reduce(x, w, group, backend="twin"),
        ops.all_gather(x, group, backend="twin").wait().clone(),
    ]


@NEEDS_TRITON
@on_ranks("world2")
def test_workspaces_of_all_groups_come_back() -> None:
    start_anew()
    groups = [dist.group.WORLD, dist.new_group(backend="gloo")]
    with registered(KernelConfig(**TINY)):
        before = [step(group) for group in groups]
        size = slab_bytes()
        slabs = [weakref.ref(slab) for group in groups for slab in state_of(group).slabs.values()]
        assert len(slabs) > len(groups)
        for _ in range(2):
            freed = megatron_flux.release()
            assert freed == size > 0
            assert (slab_bytes(), megatron_flux.release()) == (0, 0)
            assert [ref() for ref in slabs] == [None] * len(slabs), "something holds a workspace"
            for group, expected in zip(groups, before, strict=True):
                require_equal(step(group), expected)
            assert slab_bytes() == size
            slabs = [weakref.ref(slab) for group in groups for slab in state_of(group).slabs.values()]
    dist.destroy_process_group(groups.pop())
    start_anew()


@on_ranks("world2")
def test_backward_gathers_what_was_kept() -> None:
    """This holds where one rank's other graph is gone, too; later forwards keep again, with the whole budget."""
    plain, _ = Block("reference", False).results(1)
    block = Block("reference", True, 2 * gathered_bytes())
    x = one_input()
    y = block.column(x)
    other = block.column(one_input())
    if dist.get_rank() == 0:
        del other
        gc.collect()
    assert held()[0] == 2 - (dist.get_rank() == 0)
    kept = held()[1]
    start_anew()
    assert megatron_flux.release() == kept > 0
    assert held() == (0, 0)
    begun = state_of(dist.group.WORLD).gathers_begun
    y.square().sum().backward()
    assert state_of(dist.group.WORLD).gathers_begun - begun == 1
    reference = Block("reference", False)
    again = one_input()
    reference.column(again).square().sum().backward()
    require_equal([x.grad, block.weights[0].grad], [again.grad, reference.weights[0].grad])
    for weight in block.weights:
        weight.grad = None
    total = keep.report()["total"]
    found, gathers = block.results(1)
    assert (gathers, keep.report()["total"] - total) == (0, 1)
    require_equal(found, plain)


@on_ranks("world2")
def test_memory_of_unread_gradients_comes_back() -> None:
    """It is as large as the largest weight whose gradient goes to ``main_grad``."""
    start_anew()
    group: Any = dist.group.WORLD
    weight, x = torch.nn.Parameter(torch.ones(16, 8)), one_input()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    for _ in range(2):
        column_parallel_linear(x, weight, None, group, gradient_accumulation_fusion=True).sum().backward()
        weight.grad = None  # as Megatron's DistributedDataParallel does
        with captured_calls():
            assert megatron_flux.release() == 0, "a graph may write there"
        assert megatron_flux.release() == weight.nbytes
        assert megatron_flux.release() == 0


@NEEDS_TRITON
@pytest.mark.parametrize("why", ["an open gather", "a graph", "a poisoned workspace", "an open gather by slots"])
@on_ranks("world2")
def test_all_ranks_refuse_and_free_nothing(why: str) -> None:
    start_anew()
    group: Any = dist.group.WORLD
    state, x = state_of(group), torch.ones(16, 32).half()
    with registered(KernelConfig(**TINY)):
        ops.all_gather(x, group, backend="twin").wait()
        open_call = None
        if why == "a graph":
            with one_capture(3):
                ops.all_gather(x, group, backend="twin").wait()
            expected = "rank 0: a CUDA graph was captured, which holds workspaces; rank 1: a CUDA graph"
        elif why == "a poisoned workspace":
            if dist.get_rank() == 1:
                next(iter(state.slabs.values())).poison("all_gather", KeyboardInterrupt())
            expected = r"nothing is freed \(rank 1: .*all_gather.*KeyboardInterrupt"
        elif why == "an open gather":
            open_call = ops.all_gather(x, group, backend="twin")
            expected = f"rank 0: {GATHER}; rank 1: {GATHER}"
        else:
            test_ops.use("peers' memory", group)
            open_call = ops.all_gather(x, group, backend="chunked")
            expected = "rank 0: a call through peers' memory was begun and not waited for"
        size = slab_bytes()
        with pytest.raises(UserError, match=expected):
            megatron_flux.release()
        assert slab_bytes() == size > 0
        if open_call is not None:
            open_call.wait()
            assert megatron_flux.release() == size
    start_anew()


# Groups that are destroyed


def use_all(group: dist.ProcessGroup) -> None:
    """Calls of every kind on every transport; a gather stays open."""
    state = state_of(group)
    x, whole, w = torch.ones(16, 32), torch.ones(16 * group.size(), 32), torch.ones(32, 32)
    with registered(KernelConfig(**TINY)):
        ops.gemm_all_reduce(x.half(), w.half(), group, backend="twin")
        ops.all_gather_gemm(x.half(), w.half(), group, backend="twin")
        ops.gemm_reduce_scatter(whole.half(), w.half(), group, backend="twin")
        ops.all_gather(x.half(), group, backend="twin")
    assert torch.equal(ops.gemm_all_reduce(x, w, group), torch.full((16, 32), 32.0 * group.size()))
    made = {}
    for way in test_ops.WAYS:
        test_ops.use(way, group)
        test_ops.calls("chunked", group, 0, (8,), 16, 16, torch.float32, False)
        made[way] = state.transports[CPU]
    state.transports |= made  # type: ignore[arg-type]
    call = OperatorCall("gemm_reduce_scatter", whole.half(), w.half(), group)
    entries = [UNMEASURED, Entry(backend="fused", plan=KernelConfig(**TINY))]
    trial = _tuned.tuner.decisions(group).trials["a kind",] = Trial(entries, "a call")
    by = Backends(ReferenceBackend(), FusedBackend("twin", twin=True))
    state.plans["a call"] = plan = TrialPlan(call, trial, by, _tuned.tuner._note_decided)
    while 1 not in trial.effects:
        plan.run(call)
    state.kept = keep._Ledger()


@NEEDS_TRITON
@on_ranks("world2")
def test_nothing_of_a_destroyed_group_stays() -> None:
    before = len(all_states()), slab_bytes()
    group = dist.new_group(backend="gloo")
    use_all(group)
    state = state_of(group)
    parts = [state, *state.slabs.values(), *state.transports.values(), *state.plans.values(), state.kept]
    held = [(type(one).__name__, weakref.ref(one)) for one in parts if type(one).__weakrefoffset__]
    assert {"GroupState", "Slab", "HostLink", "P2PLink", "TrialPlan"} <= {name for name, _ in held}
    dist.destroy_process_group(group)
    del group, state, parts
    gc.collect()
    deadline = time.monotonic() + 10
    while (outlives := sorted(name for name, one in held if one() is not None)) and time.monotonic() < deadline:
        time.sleep(0.05)  # threads of lanes end when they come to it
    assert not outlives, outlives
    assert (len(all_states()), slab_bytes()) == before
