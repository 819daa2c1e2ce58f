"""MEGATRON_FLUX=1 that switches nothing on is said once, at the first tensor-parallel linear; else nothing is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_flux import patched
from megatron_flux.patch import unused
from megatron_flux.patch.megatron_core import LAYERS, TE_LAYERS


@pytest.fixture(autouse=True)
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of a process that has just begun."""
    unused.settle()
    monkeypatch.setattr(unused, "_settled", False)
    monkeypatch.setenv("MEGATRON_FLUX", "1")
    monkeypatch.delenv("RANK", raising=False)
    yield
    unused.settle()


def build(module: str = LAYERS, name: str = "RowParallelLinear") -> None:
    layer = type(name, (torch.nn.Module,), {"__module__": module})
    of_a_script = type("Adapted", (layer,), {})()
    of_a_script.weight = torch.nn.Parameter(torch.ones(1))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "megatron_flux"]


@pytest.mark.parametrize(("module", "name"), [(LAYERS, "ColumnParallelLinear"), (TE_LAYERS, "TERowParallelLinear")])
def test_once_by_the_first_linear(caplog: pytest.LogCaptureFixture, module: str, name: str) -> None:
    unused.watch()
    torch.nn.Linear(1, 1)
    assert said(caplog) == []
    build(module, name)
    build()
    unused.watch()
    build()
    (line,) = said(caplog)
    assert line.startswith("megatron_flux: MEGATRON_FLUX=1 has switched nothing on: it works through")
    assert "call megatron_flux.patch()" in line


@pytest.mark.parametrize("why", ["off", "rank 1", "patched", "settled"])
def test_silent(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "off":
        monkeypatch.setenv("MEGATRON_FLUX", "0")
    if why == "rank 1":
        monkeypatch.setenv("RANK", "1")
    if why == "settled":
        unused.settle()
    unused.watch()
    if why == "patched":
        with patched():
            build()
    build()
    assert [line for line in said(caplog) if "MEGATRON_FLUX" in line] == []
