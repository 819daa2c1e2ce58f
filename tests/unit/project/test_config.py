"""FluxConfig: defaults, immutability, keywords only."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_flux import FluxConfig


def test_defaults() -> None:
    assert FluxConfig() == FluxConfig(backend="auto", strict=False)
    assert FluxConfig(strict=True) != FluxConfig()


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FluxConfig().backend = "reference"  # type: ignore[misc]


def test_takes_keywords_only() -> None:
    with pytest.raises(TypeError):
        FluxConfig("reference")  # type: ignore[misc]
    with pytest.raises(TypeError):
        FluxConfig(bakcend="reference")  # type: ignore[call-arg]
