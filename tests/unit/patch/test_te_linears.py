"""patch() on megatron-core's layers over TransformerEngine, without it: what is installed and taken off again."""

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_flux
from megatron_flux import FallbackError, FluxConfig
from megatron_flux.patch import te_seam
from megatron_flux.patch.linears import LinearPatch
from megatron_flux.patch.megatron_core import INFERENCE_LAYERS, TE_KINDS, TE_LAYERS
from megatron_flux.patch.reasons import CHOICE, INFERENCE_OPTIMIZED
from tests.unit.patch.layers import X


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    import megatron.core.tensor_parallel.layers  # noqa: F401 - before its extension is exchanged

    made = extension()
    monkeypatch.setitem(sys.modules, TE_LAYERS, made)
    monkeypatch.setattr(te_seam, "load", lambda **_: SimpleNamespace(version="2.11.0"))
    yield made
    megatron_flux.unpatch()


CLASSES = ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear", "TELinear")


@pytest.fixture
def optimized(imitated: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """megatron-core's inference-optimized layers, as far as the patch looks at them; in training they call the base."""
    made = types.ModuleType(INFERENCE_LAYERS)

    def layer(name: str, base: type) -> type:
        def forward(self: Any, x: object) -> object:
            return base.forward(self, x) if self.training else "optimized"

        bases = (base, torch.nn.Module)
        return type(name, bases, {"forward": forward, "__module__": INFERENCE_LAYERS})

    for name in CLASSES:
        setattr(
            made, name.replace("TE", "Inference", 1), layer(name.replace("TE", "Inference", 1), getattr(imitated, name))
        )
    made.SomethingElse = type("SomethingElse", (), {"__module__": INFERENCE_LAYERS})
    made.TERowParallelLinear = imitated.TERowParallelLinear  # imported there
    monkeypatch.setitem(sys.modules, INFERENCE_LAYERS, made)
    return made


def test_inference_optimized_layers_run_stock_and_are_counted(
    optimized: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name.replace("TE", "Inference", 1) for name in CLASSES[:3]]
    before = [dict(vars(getattr(optimized, name))) for name in names]
    layers = [getattr(optimized, name)().eval() for name in names]
    monkeypatch.setattr(LinearPatch, "why_stock_te", lambda self, kind, *_: f"base of {kind}")
    with megatron_flux.patched():
        replaced = megatron_flux.report()["replaced"][5:8]  # behind these: of adapters, where they are imported
        assert replaced == [f"{INFERENCE_LAYERS}.{name}.forward" for name in names]
        assert [layer(X) for layer in layers] == ["optimized"] * 3
        assert optimized.InferenceLinear().eval()(X) == "optimized"  # no tensor-parallel layer
        said = INFERENCE_OPTIMIZED
        assert megatron_flux.report()["fallbacks"] == {f"{kind}: {said}": 1 for kind in TE_KINDS}
        layers[2].train()
        assert layers[2](X) == "stock"
        assert megatron_flux.report()["fallbacks"][f"TE row: {said}"] == 1
        assert megatron_flux.report()["fallbacks"]["TE row: base of TE row"] == 1
    assert [dict(vars(getattr(optimized, name))) for name in names] == before
    with megatron_flux.patched(FluxConfig(strict=True)), pytest.raises(FallbackError, match="inference-optimized"):
        layers[0](X)
    with megatron_flux.patched(FluxConfig(strict=True)):
        layers[0].__dict__[CHOICE] = "stock"
        assert layers[0](X) == "optimized"


def extension() -> types.ModuleType:
    """Its classes inherit as there: the plain ones have ``forward`` of ``TELinear``."""
    made = types.ModuleType(TE_LAYERS)

    def forward(self: object, x: object) -> str:
        """Forward."""
        return "stock"

    bases = {"TELinear": object}
    for name in ("TELayerNormColumnParallelLinear", "TELinear"):
        setattr(made, name, type(name, (), {"forward": forward, "__module__": TE_LAYERS}))
        bases[name] = getattr(made, name)
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        setattr(made, name, type(name, (bases["TELinear"],), {"__module__": TE_LAYERS}))
    made.HAVE_TE = True
    return made
