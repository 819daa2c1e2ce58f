"""When kernels of other process groups may block the fused ones, which want every SM and wait for their peers."""

from __future__ import annotations

import pytest
import torch

from megatron_flux.ops.backends.fused import limit


@pytest.mark.parametrize(
    ("connections", "margin", "refused"),
    [
        (None, None, True),
        ("8", None, True),
        ("32", "0", True),
        ("1", None, False),  # one hardware queue
        (None, "16", False),  # SMs for the others
        ("8", "4", False),
    ],
)
def test_smaller_groups_need_one_queue_or_spare_sms(
    monkeypatch: pytest.MonkeyPatch, connections: str | None, margin: str | None, refused: bool
) -> None:
    for name, value in (("CUDA_DEVICE_MAX_CONNECTIONS", connections), ("MEGATRON_FLUX_SM_MARGIN", margin)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    reason = limit(torch.bfloat16, 2, (9, 0))
    assert (reason is not None) is refused
    if reason is not None:
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in reason
        assert "MEGATRON_FLUX_SM_MARGIN" in reason
    assert limit(torch.bfloat16, 4, (9, 0)) is None, "nobody else is there to block"
