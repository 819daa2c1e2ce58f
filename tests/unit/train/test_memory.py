"""Two trainers in one process have the memory that each has by itself, with an allocator that only counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_flux.comm import group_state
from megatron_flux.train import memory
from megatron_flux.train.memory import OwnMemory, Peak

WEIGHTS, ADAM, ACTIVATIONS, SHARED, WORKSPACE = 100, 60, 40, 7, 5


class Counting:
    """torch's allocator and the workspaces of a process, as numbers."""

    def __init__(self) -> None:
        self.held = self.most = 3  # by nobody who trains
        self.cached = self.workspace = 0

    def take(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)

    def share(self) -> None:
        """Reserve memory that a library keeps."""
        self.take(SHARED - self.cached)
        self.cached = SHARED

    def forget_shared(self) -> None:
        self.held -= self.cached
        self.cached = 0


class Training:
    """Weights when it is built, optimizer state at its first step, activations in every one."""

    def __init__(self, process: Counting, *, flux: bool) -> None:
        self.process, self.begins_with = process, WORKSPACE if flux else 0
        self.own, self.adam = OwnMemory(torch.device("cuda")), ADAM
        with self.own.active():
            process.take(WEIGHTS)

    def steps(self, steps: int) -> list[Peak]:
        peaks = []
        with self.own.active():
            for _ in range(steps):
                self.own.reset_peak()
                self.process.share()
                self.process.take(ACTIVATIONS)
                self.process.workspace += self.begins_with
                self.process.take(-ACTIVATIONS)
                self.process.take(self.adam)
                self.begins_with = self.adam = 0
                peaks.append(self.own.peak())
        return peaks


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(memory, "workspace_bytes", lambda: counting.workspace)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: counting.held)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counting.most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: vars(counting).update(most=counting.held))
    monkeypatch.setattr(memory, "forget_dummy_gradients", counting.forget_shared)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return counting


def test_interleaved_trainers_have_what_each_has_alone(process: Counting) -> None:
    trainings = {"baseline": Training(process, flux=False), "flux": Training(process, flux=True)}
    peaks: dict[str, list[Peak]] = {"baseline": [], "flux": []}
    for name in ("baseline", "flux", "flux", "baseline", "baseline", "flux"):
        peaks[name] += trainings[name].steps(2)
    later = WEIGHTS + ADAM + ACTIVATIONS + SHARED
    first = max(WEIGHTS + ACTIVATIONS, WEIGHTS + ADAM) + SHARED
    assert peaks["baseline"] == [Peak(first, 0)] + [Peak(later, 0)] * 5
    assert peaks["flux"] == [Peak(first, WORKSPACE)] + [Peak(later, WORKSPACE)] * 5
    process.held, process.workspace = 3, 0
    assert Training(process, flux=True).steps(6) == peaks["flux"]


def test_on_a_cpu_only_workspaces_are_known(process: Counting) -> None:
    own, other = OwnMemory(torch.device("cpu")), OwnMemory(torch.device("cpu"))
    with own.active():
        process.workspace += WORKSPACE
        own.reset_peak()
        assert own.peak() == Peak(None, WORKSPACE)
    with other.active():
        assert other.peak() == Peak(None, 0)


def test_workspaces_are_flux_s_and_those_of_async_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setattr(group_state, "slab_bytes", lambda: 100)
    monkeypatch.setattr(symmetric, "_group_name_to_workspace_tensor", {"0": SimpleNamespace(nbytes=20), "1": None})
    assert memory.workspace_bytes() == 120
