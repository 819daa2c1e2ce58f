"""When fused kernels may run beside other process groups: the rule, and what it takes for another group's kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import links
from megatron_flux.comm.links import ALONE, Beside
from megatron_flux.ops.backends.fused import limit

OTHERS, HIGH = Beside(others=True, high_priority=False), Beside(others=False, high_priority=True)
QUEUES, GRAPHS, PRIORITY = "set CUDA_DEVICE_MAX_CONNECTIONS=1 before", "CUDA graphs", "high priority"


@pytest.mark.parametrize(
    ("size", "found", "captured", "queues", "margin", "reason"),
    [
        # Nobody else: whatever the environment.
        (4, ALONE, False, None, None, None),
        (4, ALONE, True, None, None, None),
        # Ordinary training, TP x DP without graphs.
        (2, ALONE, False, "1", None, None),
        (2, ALONE, False, "8", None, QUEUES),
        (2, ALONE, False, None, None, QUEUES),
        (2, ALONE, False, "8", "16", None),
        # Another group over the same ranks is as good as one over others.
        (4, OTHERS, False, None, None, QUEUES),
        (4, OTHERS, False, "1", None, None),
        # One hardware queue does not order graphs' launches, nor priorities.
        (2, ALONE, True, "1", None, GRAPHS),
        (4, OTHERS, True, "1", None, GRAPHS),
        (2, ALONE, True, "1", "16", None),
        (4, OTHERS, True, None, "16", None),
        (4, HIGH, False, "1", None, PRIORITY),
        (2, HIGH, False, "1", None, PRIORITY),
        (2, HIGH, True, "1", "16", None),
    ],
)
def test_the_rule(
    size: int,
    found: Beside,
    captured: bool,
    queues: str | None,
    margin: str | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("CUDA_DEVICE_MAX_CONNECTIONS", queues), ("MEGATRON_FLUX_SM_MARGIN", margin)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    said = limit(torch.bfloat16, size, (9, 0), beside=found, captured=captured)
    assert (said is None) if reason is None else reason in (said or "")
    assert said is None or "MEGATRON_FLUX_SM_MARGIN" in said, "it always helps"


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "reason"),
    [
        (torch.bfloat16, 8, (8, 0), None),
        (torch.float32, 8, (9, 0), "bf16, fp16 or FP8"),
        (torch.bfloat16, 3, (9, 0), "2, 4 or 8 ranks, not 3"),
        (torch.bfloat16, 8, (7, 5), "compute capability 8.0, this GPU has 7.5"),
    ],
)
def test_limits(
    dtype: torch.dtype, size: int, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: size)
    found = limit(dtype, size, capability)
    assert (found is None) if reason is None else reason in (found or "")


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
