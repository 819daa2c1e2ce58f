"""doctor: what it finds here, and what it says of a machine it cannot run on."""

from collections.abc import Callable

import pytest

from megatron_flux.patch import megatron_core
from megatron_flux.telemetry import environment


def test_it_says_what_is_here(cli: Callable[..., str]) -> None:
    text = cli("doctor")
    for words in (
        f"torch {environment.versions()['torch']}",
        "megatron.core.tensor_parallel.layers.RowParallelLinear.forward",
        "auto, reference",
        "flux can run here; auto is reference: no GPU",
        "it shows the losses, and nothing of the speed",
    ):
        assert words in text


def test_an_unsupported_megatron_core_is_the_verdict(monkeypatch: pytest.MonkeyPatch, cli: Callable[..., str]) -> None:
    monkeypatch.setattr(megatron_core, "installed_megatron_core", lambda: "0.12.1")
    text = cli("doctor", code=1)
    assert "megatron-core 0.12.1 is not supported; supported is >=0.15,<0.21" in text
    assert "flux cannot run here" in text
    assert "RowParallelLinear" not in text
