"""The rule by which fused calls start on all ranks together, and what counts as another group's kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import links
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Beside
from megatron_flux.log_once import log_once
from tests.unit.groups import group_of

ALONE = Beside(others=False, high_priority=False)
OTHERS, HIGH = Beside(others=True, high_priority=False), Beside(others=False, high_priority=True)


@pytest.mark.parametrize(
    ("found", "captured", "queues", "together"),
    [
        # Nobody else: whatever the environment.
        (ALONE, False, None, False),
        (ALONE, True, None, False),
        # Ordinary training, TP x DP without graphs.
        (OTHERS, False, "1", False),
        (OTHERS, False, "8", True),
        (OTHERS, False, None, True),
        # One hardware queue does not order graphs' launches, nor priorities.
        (OTHERS, True, "1", True),
        (HIGH, False, "1", True),
        (HIGH, True, "1", True),
    ],
)
def test_the_rule(
    found: Beside, captured: bool, queues: str | None, together: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False) if queues is None else monkeypatch.setenv(name, queues)
    log_once.cache_clear()
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    group = group_of(2)
    state_of(group).beside = found
    assert [links.starts_together(group, captured=captured) for _ in range(2)] == [together] * 2
    helps = together and queues != "1"
    assert caplog.text.count("set CUDA_DEVICE_MAX_CONNECTIONS=1 before CUDA starts") == helps, "once, if it helps"


def with_options(options: Any) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))


def no_backend(device: torch.device) -> None:
    raise RuntimeError("no backend for cuda")


@pytest.mark.parametrize(
    ("group", "high"),
    [
        (with_options(SimpleNamespace(is_high_priority_stream=True)), True),
        (with_options(SimpleNamespace(is_high_priority_stream=False)), False),
        (with_options(None), False),
        (SimpleNamespace(_get_backend=no_backend), False),
    ],
)
def test_priority_is_read_from_the_groups_options(group: Any, high: bool) -> None:
    assert links._has_high_priority(group) is high
