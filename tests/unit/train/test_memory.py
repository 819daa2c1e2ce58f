"""Whose memory it is, with an allocator that only counts: two arms in one process have what each has by itself."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron_flux.comm import group_state
from megatron_flux.train import measurements
from megatron_flux.train.measurements import OwnMemory, Peak

WEIGHTS, ADAM, ACTIVATIONS, SHARED, WORKSPACE = 100, 60, 40, 7, 5


@dataclass
class Counting:
    """torch's allocator and the workspaces of a process, as numbers."""

    held: int = 3  # by nobody who trains
    most: int = 0
    cached: int = 0
    workspace: int = 0

    def take(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)

    def share(self) -> None:
        """What a library keeps for whoever comes next."""
        if not self.cached:
            self.cached = SHARED
            self.take(SHARED)

    def reset_peak(self) -> None:
        self.most = self.held

    def forget_shared(self) -> None:
        self.held -= self.cached
        self.cached = 0


class Training:
    """Weights when it is built, optimizer state at its first step, activations in every one."""

    def __init__(self, process: Counting, *, flux: bool) -> None:
        self.process, self.flux = process, flux
        self.own = OwnMemory(torch.device("cuda"))
        self.stepped = False
        with self.own.turn():
            process.take(WEIGHTS)

    def turn(self, steps: int) -> list[Peak]:
        found = []
        with self.own.turn():
            for _ in range(steps):
                self.own.reset_peak()
                self.process.share()
                self.process.take(ACTIVATIONS)
                if self.flux and not self.stepped:
                    self.process.workspace += WORKSPACE
                self.process.take(-ACTIVATIONS)
                if not self.stepped:
                    self.process.take(ADAM)
                self.stepped = True
                found.append(self.own.peak())
        return found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(measurements, "workspace_bytes", lambda: counting.workspace)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: counting.held)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counting.most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: counting.reset_peak())
    monkeypatch.setattr(measurements, "forget_dummy_gradients", counting.forget_shared)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return counting


def test_two_arms_in_turns_have_what_each_has_alone(process: Counting) -> None:
    arms = {"baseline": Training(process, flux=False), "flux": Training(process, flux=True)}
    found: dict[str, list[Peak]] = {"baseline": [], "flux": []}
    for name in ("baseline", "flux", "flux", "baseline", "baseline", "flux"):
        found[name] += arms[name].turn(2)
    later = WEIGHTS + ADAM + ACTIVATIONS + SHARED
    first = max(WEIGHTS + ACTIVATIONS, WEIGHTS + ADAM) + SHARED
    assert found["baseline"] == [Peak(first, 0)] + [Peak(later, 0)] * 5
    assert found["flux"] == [Peak(first, WORKSPACE)] + [Peak(later, WORKSPACE)] * 5
    assert sum(found["flux"][-1]) == later + WORKSPACE

    process.held, process.workspace = 3, 0
    alone = Training(process, flux=True)
    assert alone.turn(6) == found["flux"]


def test_an_arm_owns_what_it_loads_between_its_turns_of_steps(process: Counting) -> None:
    one, other = Training(process, flux=False), Training(process, flux=False)
    for arm in (one, other):
        with arm.own.turn():  # a checkpoint
            process.take(ADAM)
            arm.stepped = True
    assert other.turn(1) == one.turn(1) == [Peak(WEIGHTS + ADAM + ACTIVATIONS + SHARED, 0)]


def test_on_a_cpu_only_workspaces_are_known(process: Counting) -> None:
    own, other = OwnMemory(torch.device("cpu")), OwnMemory(torch.device("cpu"))
    with own.turn():
        process.workspace += WORKSPACE
        own.reset_peak()
        assert own.peak() == Peak(None, WORKSPACE)
    with other.turn():
        assert other.peak() == Peak(None, 0)


def test_workspaces_are_flux_s_and_those_of_async_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setattr(group_state, "slab_bytes", lambda: 100)
    monkeypatch.setattr(symmetric, "_group_name_to_workspace_tensor", {"0": SimpleNamespace(nbytes=20), "1": None})
    assert measurements.workspace_bytes() == 120
