"""The rule by which fused calls start on all ranks together, and what counts as another group's kernels."""

from types import SimpleNamespace
from typing import Any

import pytest

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


def test_priority_is_read_from_the_groups_options() -> None:
    for options, high in ((SimpleNamespace(is_high_priority_stream=True), True), (None, False)):
        group: Any = SimpleNamespace(_get_backend=lambda _, options=options: SimpleNamespace(options=options))
        assert links._has_high_priority(group) is high
