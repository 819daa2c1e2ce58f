"""Memory of a trainer's own, as far as a CPU has it. On GPUs: tests/gpu/test_memory.py."""

import pytest
import torch

from megatron_flux.comm import group_state
from megatron_flux.train.memory import OwnMemory, Peak


def test_workspaces_are_those_of_whoever_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [3]  # by nobody who trains
    monkeypatch.setattr(group_state, "slab_bytes", lambda: held[0])
    own, other = OwnMemory(torch.device("cpu")), OwnMemory(torch.device("cpu"))
    with own.active():
        held[0] += 5
        own.reset_peak()
        assert own.peak() == Peak(None, 5)
    with other.active():
        assert other.peak() == Peak(None, 0)
    with own.active():
        assert own.peak() == Peak(None, 5)
