"""A destroyed group takes its state and its memory along, whatever ran on it: nothing in there refers to the group."""

import gc
import time
import weakref

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.group_state import all_states, slab_bytes, state_of
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.backends.reference import ReferenceBackend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner.cache import Entry
from megatron_flux.ops.tuner.candidates import UNMEASURED, Backends
from megatron_flux.ops.tuner.trial import Trial, TrialPlan
from tests.distributed import test_chunked
from tests.distributed.pool import on_ranks
from tests.distributed.test_chunked import WAYS
from tests.distributed.twins import NEEDS_TRITON, TINY, registered

pytestmark = NEEDS_TRITON

CPU = torch.device("cpu")


def use(group: dist.ProcessGroup) -> None:
    """Calls of every kind on every transport; a gather stays open."""
    from megatron_flux.layers import keep
    from megatron_flux.ops.backends.registry import _tuned

    state = state_of(group)
    x, whole, w = torch.ones(16, 32), torch.ones(16 * group.size(), 32), torch.ones(32, 32)
    with registered(KernelConfig(**TINY)):
        ops.gemm_all_reduce(x.half(), w.half(), group, backend="twin")
        ops.all_gather_gemm(x.half(), w.half(), group, backend="twin")
        ops.gemm_reduce_scatter(whole.half(), w.half(), group, backend="twin")
        ops.all_gather(x.half(), group, backend="twin")
    assert torch.equal(ops.gemm_all_reduce(x, w, group), torch.full((16, 32), 32.0 * group.size()))
    made = {}
    for way in WAYS:
        test_chunked.use(way, group)
        test_chunked.calls("chunked", group, 0, (8,), 16, 16, torch.float32, False, 0.0)
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


@on_ranks("world2")
def test_nothing_of_a_destroyed_group_stays() -> None:
    before = len(all_states()), slab_bytes()
    group = dist.new_group(backend="gloo")
    use(group)
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
