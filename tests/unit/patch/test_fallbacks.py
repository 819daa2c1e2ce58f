"""Layers left to stock Megatron: logged once per reason, counted always, an error when strict."""

from __future__ import annotations

import logging

import pytest

from megatron_flux import FallbackError
from megatron_flux.patch.fallbacks import Fallbacks


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "megatron_flux" and r.levelno == logging.WARNING]


def test_each_reason_is_said_once_and_every_call_counted(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    for _ in range(3):
        fallbacks.take("column", "tp = 1", "layer A", strict=False)
    fallbacks.take("column", "tp = 1", "layer B", strict=False)
    fallbacks.take("row", "tp = 1", "layer C", strict=False)
    fallbacks.take("column", "autocast", "layer A", strict=False)
    said = messages(caplog)
    assert len(said) == 3
    assert "column" in said[0]
    assert "tp = 1" in said[0]
    assert "layer A" in said[0]
    assert dict(fallbacks.counts) == {("column", "tp = 1"): 4, ("row", "tp = 1"): 1, ("column", "autocast"): 1}


def test_strict_raises_with_layer_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with pytest.raises(FallbackError) as error:
        fallbacks.take("row", "sequence parallelism is off", "RowParallelLinear(8, 4)", strict=True)
    message = str(error.value)
    assert "row layer RowParallelLinear(8, 4)" in message
    assert "sequence parallelism is off" in message
    assert "strict=False" in message
    assert messages(caplog) == []
