"""MEGATRON_FLUX=1 outside of Megatron-LM: once, at the first tensor-parallel linear; else nothing happens."""

from collections.abc import Iterator

import pytest
import torch

from megatron_flux import patched
from megatron_flux.patch import first_linear, patcher
from megatron_flux.patch.megatron_core import LAYERS, TE_LAYERS

Calls = list[str]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Return what was switched on, on rank 0 of a process that has just begun."""
    monkeypatch.setattr(first_linear, "_settled", False)
    monkeypatch.setattr(patcher, "was_patched", False)
    monkeypatch.setattr(first_linear, "_handle", None)
    monkeypatch.setenv("MEGATRON_FLUX", "1")
    found: Calls = []
    monkeypatch.setattr(first_linear, "_switch_on", lambda: found.append("on"))
    yield found
    if first_linear._handle is not None:
        first_linear._handle.remove()


def build(module: str = LAYERS, name: str = "RowParallelLinear") -> None:
    layer = type(name, (torch.nn.Module,), {"__module__": module})
    of_a_script = type("Adapted", (layer,), {})()
    of_a_script.weight = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("why", ["", "off", "patched", "settled"])
def test_switched_on_once_unless_there_is_a_reason(calls: Calls, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "off":
        monkeypatch.setenv("MEGATRON_FLUX", "0")
    if why == "settled":
        first_linear.settle()
    first_linear.watch()
    torch.nn.Linear(1, 1)
    assert calls == []
    if why == "patched":
        with patched():
            build()
    build()
    build(TE_LAYERS, "TERowParallelLinear")
    assert calls == ([] if why else ["on"])
