"""NVIDIA's ModelOpt quantises megatron-core's linears, patched or not, to the same numbers: real nvidia-modelopt."""

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, FluxConfig, report
from tests.distributed import te_stand_in
from tests.distributed.megatron_world import FAMILIES, flux, megatron, model_config
from tests.distributed.pool import on_ranks

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
QUANTISED = "modelopt.torch.quantization.nn.modules.quant_linear._QuantLinear.quantized_linear_fn"
TE_QUANTISED = "modelopt.torch.quantization.plugins.transformer_engine"
REASONS = {
    "local": (f"linear_with_grad_accumulation_and_async_allreduce replaced by {QUANTISED}",) * 2,
    "TE": (
        f"_LayerNormLinear replaced by {TE_QUANTISED}._QuantLayerNormLinearFunc",
        f"_Linear.apply replaced by {TE_QUANTISED}._QuantTELinear.te_quantized_linear_fn",
    ),
}


def mlp(layers: str) -> torch.nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules

    if layers == "TE":
        extension: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
        column, row = extension.TELayerNormColumnParallelLinear, extension.TERowParallelLinear
    else:
        column, row = ColumnParallelLinear, RowParallelLinear
    torch.manual_seed(5)
    config = model_config(**FAMILIES["gpt3"], perform_initialization=True)
    return MLP(config, MLPSubmodules(linear_fc1=column, linear_fc2=row))


def run(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)[0]
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def ranges(model: torch.nn.Module) -> dict[str, list[float]]:
    """Return the ranges that calibration has found."""
    return {name: b.flatten().tolist() for name, b in model.named_buffers() if name.endswith("_amax")}


@pytest.mark.parametrize("layers", ["local", pytest.param("TE", marks=te_stand_in.needed)])
@on_ranks("libraries_world2")
def test_a_quantised_model_has_stocks_numbers(layers: str) -> None:
    import modelopt.torch.quantization as mtq

    with megatron(tp=2):
        x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain = run(mlp(layers), x)
        stock = mtq.quantize(mlp(layers), mtq.INT8_DEFAULT_CFG, lambda model: model(x))
        expected = run(stock, x)
        assert not torch.equal(plain[0], expected[0])
        assert len(ranges(stock)) == 4
        with flux() as seen:
            patched = mtq.quantize(mlp(layers), mtq.INT8_DEFAULT_CFG, lambda model: model(x))
            now = run(patched, x)
            ran = report(patched)["layers"]
        assert ranges(patched) == ranges(stock)
        assert len(now) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(now, expected, strict=True))
        assert ran == {f"linear_fc{i}": f"stock: {reason}" for i, reason in enumerate(REASONS[layers], 1)}
        assert seen.active_layers == 0
        assert sum(seen.fallbacks.values()) >= 4  # calibration and the call
        with flux() as seen:
            unquantised = run(mlp(layers), x)
        assert seen.fallbacks == {}
        assert seen.calls["all_gather_gemm/reference"] == 2
        assert all(torch.equal(a, b) for a, b in zip(unquantised, plain, strict=True))
        # Last: an error in a layer's forward leaves ModelOpt's functions where they are.
        with flux(FluxConfig(strict=True)), pytest.raises(FallbackError, match=r"modelopt\.torch\.quantization"):
            run(patched, x)
