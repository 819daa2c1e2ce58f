"""Memory of a trainer's own, as far as a CPU has it. On GPUs: tests/gpu/test_memory.py."""

from types import SimpleNamespace

import pytest
import torch

from megatron_flux.comm import group_state
from megatron_flux.train import memory
from megatron_flux.train.memory import OwnMemory, Peak


def test_workspaces_are_those_of_whoever_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [3]  # by nobody who trains
    monkeypatch.setattr(memory, "workspace_bytes", lambda: held[0])
    own, other = OwnMemory(torch.device("cpu")), OwnMemory(torch.device("cpu"))
    with own.active():
        held[0] += 5
        own.reset_peak()
        assert own.peak() == Peak(None, 5)
    with other.active():
        assert other.peak() == Peak(None, 0)
    with own.active():
        assert own.peak() == Peak(None, 5)


def test_workspaces_are_flux_s_and_those_of_async_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setattr(group_state, "slab_bytes", lambda: 100)
    monkeypatch.setattr(symmetric, "_group_name_to_workspace_tensor", {"0": SimpleNamespace(nbytes=20), "1": None})
    assert memory.workspace_bytes() == 120
