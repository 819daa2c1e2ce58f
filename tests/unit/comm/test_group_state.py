"""The state of a group: whose slab it is, when it is replaced, and that memory is bounded."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import group_state, slab
from megatron_flux.comm.group_state import MOST_SIZES, Cache, all_states, state_of
from megatron_flux.comm.slab import MIB, MOST_CALLS

CPU = torch.device("cpu")


class Group:
    def __init__(self, name: str) -> None:
        self.group_name = name


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def make(group: Any, half_bytes: int, device: torch.device, captured: bool, fill: Any) -> Any:
        work = SimpleNamespace(half_bytes=half_bytes, in_graphs=False, closed=False, calls=0, limit=MOST_CALLS)
        work.alarm = SimpleNamespace(close=lambda: setattr(work, "closed", True))
        found.append(work)
        return work

    monkeypatch.setattr(slab, "make", make)
    return found


def test_a_state_belongs_to_one_group_whatever_its_name_and_goes_with_it(made: list[Any]) -> None:
    first, second = Group("tp"), Group("tp")
    state = state_of(first)  # type: ignore[arg-type]
    assert state_of(first) is state  # type: ignore[arg-type]
    old = state.slab("gemm", MIB, CPU, False)
    assert state.slab("gemm", MIB, CPU, False) is old
    assert state_of(second) is not state  # type: ignore[arg-type]
    assert state_of(second).slab("gemm", MIB, CPU, False) is not old  # type: ignore[arg-type]
    gc.collect()  # those of tests before
    held, before = weakref.ref(state), len(all_states())
    del state, old, first
    made.clear()
    gc.collect()
    assert held() is None
    assert len(all_states()) == before - 1


@pytest.mark.parametrize("in_graphs", [False, True])
def test_a_larger_call_replaces_the_slab_and_plans_leave_it(made: list[Any], in_graphs: bool) -> None:
    group = Group("tp")
    state = state_of(group)  # type: ignore[arg-type]
    small = state.slab("gemm", MIB, CPU, False)
    small.in_graphs = in_graphs
    other = state.slab("gather", MIB, CPU, False)
    large = state.slab("gemm", 8 * MIB, CPU, False)
    assert large is not small
    assert (small.limit, other.limit, large.limit) == (0, MOST_CALLS, MOST_CALLS)
    assert state.slab("gemm", MIB, CPU, False) is large
    assert state.slab("gather", MIB, CPU, False) is other
    assert state.graph_slabs == ([small] if in_graphs else []), "graphs hold its addresses"
    assert small.closed is not in_graphs, "its waits are watched as long as they may come"


def test_shapes_that_never_come_again_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest entry goes, whatever was looked up: ranks that make the same calls drop the same ones."""
    monkeypatch.setattr(group_state, "MOST_ENTRIES", most := 32)
    state = state_of(Group("tp"))  # type: ignore[arg-type]
    for m in range(2 * most):
        state.plans[m] = m
        assert state.plans.get(m // 2 + most // 2) is None or m
    assert list(state.plans) == list(range(most, 2 * most))
    assert all(isinstance(one, Cache) for one in (state.plans, state.compared, state.kernels))


def test_a_slab_grows_to_what_is_needed_and_later_by_powers_of_two(made: list[Any]) -> None:
    """A model's few calls waste no memory; lengths that ever grow make few slabs."""
    group = Group("tp")
    state = state_of(group)  # type: ignore[arg-type]
    for size in range(1, MOST_SIZES + 2):
        assert state.slab("gemm", size * 5 * MIB, CPU, False).half_bytes == slab.size_class(size * 5 * MIB)
    for size in range(5 * (MOST_SIZES + 1), 1000, 3):
        found = state.slab("gemm", size * MIB, CPU, False)
        assert size * MIB <= found.half_bytes < 2 * size * MIB
    assert len(made) <= MOST_SIZES + 1 + 6
