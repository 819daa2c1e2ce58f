"""A destroyed group takes its state and its memory along, whatever ran on it: nothing in there refers to the group."""

from __future__ import annotations

import gc
import importlib.util
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import all_states, slab_bytes, state_of
from megatron_flux.ops import fast_path
from megatron_flux.ops.call import OperatorCall
from tests.distributed import test_chunked
from tests.distributed.pool import WorkerPool
from tests.distributed.test_chunked import WAYS

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

CPU = torch.device("cpu")
CLASSES = {
    "Alarm", "Decisions", "Entry", "GroupState", "HostLink", "LinkAlarm", "P2PLink", "PreparedGemmReduceScatter",
    "PreparedStock", "Progress", "Push", "Regions", "Slab", "_Ledger",
}  # fmt: skip
"""Among others a state has these after the calls."""


def reachable(root: object) -> list[Any]:
    """All that ``root`` keeps alive, through closures too, but for what the program has anyhow."""
    found: dict[int, Any] = {}
    left = [root]
    while left:
        one = left.pop()
        if id(one) in found or isinstance(one, type | types.ModuleType | weakref.ref):
            continue
        found[id(one)] = one
        if isinstance(one, types.FunctionType):
            left += [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
        else:
            left += gc.get_referents(one)
    return list(found.values())


def use(group: dist.ProcessGroup) -> None:
    """Calls of every kind on every transport; a gather stays open."""
    from megatron_flux.layers import keep
    from megatron_flux.ops.backends.registry import _tuned
    from tests.distributed.test_fused_twin import PLANS, twin

    state, fused = state_of(group), twin()
    x, whole, w = torch.ones(16, 32), torch.ones(16 * group.size(), 32), torch.ones(32, 32)
    summed = OperatorCall("gemm_all_reduce", x, w, group)
    fused.config = next(iter(PLANS.values()))
    summed._replace(x=x.half(), weight=w.half()).run(fused)
    for operator, given in (("all_gather_gemm", x), ("gemm_reduce_scatter", whole), ("all_gather", x)):
        weight = None if operator == "all_gather" else w.half()
        OperatorCall(operator, given.half(), weight, group).run(fused)
    made = {}
    for way in WAYS:
        test_chunked.use(way, group)
        test_chunked.calls("chunked", group, 0, (8,), 16, 16, torch.float32, False, 0.0)
        made[way] = state.transports[CPU]
    state.transports |= made  # type: ignore[arg-type]
    stock = fast_path.PreparedStock(summed)
    assert torch.equal(stock(x, w).wait(), torch.full((16, 32), 32.0 * group.size()))
    prepared = fast_path.PreparedGemmReduceScatter(state.slabs["gemm", False], [None, None], (16, 32))
    state.prepared = {"stock": fast_path.Entry(stock, "tuned", 0), "fused": fast_path.Entry(prepared, "fused", 0)}
    _tuned.tuner.decisions(group)
    state.kept = keep._Ledger()


def rank_goes() -> None:
    before = len(all_states()), slab_bytes()
    group = dist.new_group(backend="gloo")
    use(group)
    there = reachable(state_of(group))
    names = {type(one).__name__ for one in there}
    assert names >= CLASSES, CLASSES - names
    keeping = [type(one).__name__ for one in there if isinstance(one, dist.ProcessGroup)]
    held = [
        (type(one).__name__, weakref.ref(one))
        for one in there
        if type(one).__module__.startswith(("megatron_flux.comm", "megatron_flux.ops.fast_path", "torch"))
        and type(one).__weakrefoffset__
        and not isinstance(one, torch.device | torch.dtype)
    ]
    dist.destroy_process_group(group)
    del group, there
    gc.collect()
    assert not keeping, "a state keeps its group"
    assert sorted(name for name, one in held if one() is not None) == [], "what outlives its group"
    assert (len(all_states()), slab_bytes()) == before


def test_nothing_of_a_destroyed_group_stays(world2: WorkerPool) -> None:
    world2.run(rank_goes)
