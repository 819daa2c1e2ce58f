"""Turns on a slab that eager calls take: which stream they follow; and whose slab it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import slab
from megatron_flux.comm.slab import MIB, Slab, SlabPool


@pytest.fixture
def eager_slab() -> Slab:
    device: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), get_device=lambda: 0)
    alarm: Any = SimpleNamespace(message=lambda: None)
    empty = torch.empty(0)
    return Slab(None, 0, False, [], [], device, empty, empty, empty, alarm)  # type: ignore[arg-type]


def test_eager_calls_follow_a_change_of_stream(eager_slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls made ready and others take turns on three streams: each change is a wait, anything else is none."""
    current, waits = 0, []

    def stream(number: int) -> Any:
        return SimpleNamespace(number=number, wait_stream=lambda other: waits.append((number, other.number)))

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream(current))
    halves = []
    for current, made_ready in ((1, True), (1, True), (2, True), (2, False), (3, False), (1, True), (1, False)):
        if made_ready:
            half, raw = eager_slab.step()
            assert raw == current
        else:
            half = eager_slab.begin().half
            eager_slab.end()
        halves.append(half)
    assert waits == [(2, 1), (3, 2), (1, 3)]
    assert halves == [0, 1, 0, 1, 0, 1, 0]


class Group:
    def __init__(self, name: str) -> None:
        self.group_name = name


@pytest.mark.parametrize("in_graphs", [False, True])
def test_a_slab_belongs_to_one_group_whatever_its_name(monkeypatch: pytest.MonkeyPatch, in_graphs: bool) -> None:
    closed: list[Any] = []

    def make(group: Any, half_bytes: int, device: torch.device, captured: bool) -> Any:
        made = SimpleNamespace(group=group, half_bytes=half_bytes, in_graphs=False)
        made.alarm = SimpleNamespace(close=lambda: closed.append(made))
        return made

    monkeypatch.setattr(slab, "_make", make)
    pool, device = SlabPool(), torch.device("cpu")
    first, second = Group("tp"), Group("tp")
    old: Any = pool.get(first, "gemm", MIB, device, False)  # type: ignore[arg-type]
    old.in_graphs = in_graphs
    assert pool.get(first, "gemm", MIB, device, False) is old  # type: ignore[arg-type]
    generation = pool.generation
    new: Any = pool.get(second, "gemm", MIB, device, False)  # type: ignore[arg-type]
    assert new is not old
    assert new.group is second
    assert pool.generation > generation, "calls that were made ready hold the old one"
    assert closed == [old], "nobody watches a destroyed group's alarm"
    assert pool._kept == [], "its graphs can never be replayed again"
    assert pool.get(second, "gemm", MIB, device, False) is new  # type: ignore[arg-type]
