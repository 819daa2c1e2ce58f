"""How much of the GPU's memory kept inputs may have: without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.config import Backends
from megatron_flux.layers import keep
from megatron_flux.ops.backends import registry
from tests.unit.groups import group_of

FREE = 4000


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks only this one says anything; ``auto`` is ``reference``."""
    monkeypatch.setattr(keep, "of_all_ranks", lambda mine, group: [mine])
    monkeypatch.setattr(keep, "capturing", lambda x: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 0))
    monkeypatch.setattr(registry, "resolve", lambda *args: (registry.get_backend("reference"), []))


def kept(group: Any, elements: int) -> keep.Kept | None:
    """Of an input of ``elements`` of two bytes."""
    x: Any = SimpleNamespace(
        is_cuda=True, device="cuda", dtype=torch.bfloat16, numel=lambda: elements, element_size=lambda: 2
    )
    weight: Any = SimpleNamespace(requires_grad=True, is_contiguous=lambda: True)
    return keep.reserve(x, weight, group, Backends.of("auto"), None)


def test_a_quarter_of_the_free_memory_for_all_groups() -> None:
    first, second = group_of(2), group_of(2)
    held = kept(first, 200)
    assert held is not None
    assert held.nbytes == 2 * 200 * 2
    more = kept(first, 51)
    assert more is None
    rest = kept(first, 50)
    assert rest is not None
    assert kept(second, 1) is None
    held.taken()
    assert kept(first, 200) is not None
