"""patch() on megatron-core's inference-optimized layers over TransformerEngine, without it."""

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
from megatron_flux.patch.megatron_core import INFERENCE_LAYERS, TE_LAYERS
from megatron_flux.patch.reasons import CHOICE, INFERENCE_OPTIMIZED
from tests.unit.patch.layers import X


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Its module, as far as the patch looks at it; in training layers call their base."""
    import megatron.core.tensor_parallel.layers  # noqa: F401 - before its extension is exchanged

    def stock(self: Any, x: object) -> str:
        return "stock"

    def forward(self: Any, x: object) -> object:
        return te.TERowParallelLinear.forward(self, x) if self.training else "optimized"

    te: Any = types.ModuleType(TE_LAYERS)
    for name, base in {"TELayerNormColumnParallelLinear": None, "TELinear": None, "TEColumnParallelLinear": "TELinear",
                       "TERowParallelLinear": "TELinear"}.items():  # fmt: skip
        methods = {} if base else {"forward": stock}
        setattr(te, name, type(name, (getattr(te, base) if base else object,), {"__module__": TE_LAYERS, **methods}))
    te.HAVE_TE = True
    made: Any = types.ModuleType(INFERENCE_LAYERS)
    own: dict[str, Any] = {"forward": forward, "__module__": INFERENCE_LAYERS}
    made.InferenceRowParallelLinear = type("InferenceRowParallelLinear", (te.TERowParallelLinear, torch.nn.Module), own)
    made.TERowParallelLinear = te.TERowParallelLinear  # imported there
    for name, module in ((TE_LAYERS, te), (INFERENCE_LAYERS, made)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(te_seam, "load", lambda **_: SimpleNamespace(version="2.11.0"))
    yield made
    megatron_flux.unpatch()


def test_inference_optimized_layers_run_stock_and_are_counted(
    optimized: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = optimized.InferenceRowParallelLinear
    before, layer = dict(vars(cls)), cls().eval()
    monkeypatch.setattr(LinearPatch, "why_stock_te", lambda self, kind, *_: f"base of {kind}")
    with megatron_flux.patched():
        assert f"{INFERENCE_LAYERS}.InferenceRowParallelLinear.forward" in megatron_flux.report()["replaced"]
        assert layer(X) == "optimized"
        counted = {f"TE row: {INFERENCE_OPTIMIZED}": 1}
        assert megatron_flux.report()["fallbacks"] == counted
        assert layer.train()(X) == "stock"
        assert megatron_flux.report()["fallbacks"] == counted | {"TE row: base of TE row": 1}
    assert dict(vars(cls)) == before
    layer.eval()
    with megatron_flux.patched(FluxConfig(strict=True)):
        with pytest.raises(FallbackError, match="inference-optimized"):
            layer(X)
        layer.__dict__[CHOICE] = "stock"
        assert layer(X) == "optimized"
