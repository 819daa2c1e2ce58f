"""Budget of GPU memory for kept inputs, and when it is known: without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.config import ALL_EXACT, Backends
from megatron_flux.layers import keep
from megatron_flux.layers.precision import EXACT
from megatron_flux.ops.backends import registry
from tests.unit.groups import group_of


class Ranks:
    """Answer of one other rank to this one: ``theirs``, if not the same."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.theirs: list[Any] = []

    def all(self, mine: Any, *_: Any) -> list[Any]:
        self.said.append(mine)
        return [mine, self.theirs.pop(0) if self.theirs else mine]


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """A GPU of 4000 bytes free, which once had 1000 fewer; ``auto`` is ``reference``."""
    found = Ranks()
    monkeypatch.setattr(keep, "of_all_ranks", found.all)
    monkeypatch.setattr(keep, "capturing", lambda x: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 1300)
    monkeypatch.setattr(
        registry, "resolve", lambda name, *_: (registry.get_backend(name.replace("auto", "reference")), [])
    )
    return found


def kept(group: Any, elements: int, budget: int | None = None) -> keep.Kept | None:
    """Reserve memory for an input of ``elements`` of two bytes."""
    x: Any = SimpleNamespace(
        is_cuda=True, device="cuda", dtype=torch.bfloat16, numel=lambda: elements, shape=(elements,),
        new_empty=torch.empty,
    )  # fmt: skip
    weight: Any = SimpleNamespace(requires_grad=True, is_contiguous=lambda: True)
    how = {"backends": Backends.of("auto"), "wires": ALL_EXACT, "precision": EXACT[False]}
    linear: Any = SimpleNamespace(parameter=weight, group=group, **how)
    return keep.reserve(x, linear, True, budget)


def optimizer_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_a_quarter_of_what_a_whole_step_has_never_needed(ranks: Ranks) -> None:
    first, second = group_of(2), group_of(2)
    optimizer_step()  # of another model, whose memory says nothing of what this one will need
    assert kept(first, 1) is kept(first, 1) is kept(second, 1) is None
    assert ranks.said == []
    optimizer_step()
    held = kept(first, 200)
    assert held is not None
    assert held.nbytes == 2 * 200 * 2
    assert kept(first, 51) is None
    assert kept(first, 50) is not None
    assert ranks.said == [1000], "agreed once"
    assert kept(second, 1) is None, "the budget is the process's"
    held.take()
    assert kept(first, 200) is not None


def test_the_least_that_any_rank_grants(ranks: Ranks) -> None:
    group = group_of(2)
    ranks.theirs = [8]
    assert [kept(group, 1, 100) is not None for _ in range(3)] == [True, True, False]
    assert ranks.said == [100]


def test_a_graph_that_was_dropped_counts_until_the_next_step() -> None:
    group = group_of(2)
    dropped = kept(group, 1, 4)
    assert dropped is not None
    assert kept(group, 1, 4) is None
    optimizer_step()
    assert kept(group, 1, 4) is not None
    dropped.take()  # of a graph that outlived its step: not given back twice
    assert kept(group, 1, 4) is None
