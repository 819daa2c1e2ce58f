"""Deferred wgrad of the output layer (``defer_embedding_wgrad_compute``), patched against stock."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, FluxConfig
from megatron_flux.layers.backward import accumulate
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed.data import integers, require_equal
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import on_ranks
from tests.distributed.test_stock_layers import IN, B, S, make

STRICT = FluxConfig(strict=True, backend="reference")
MICRO_BATCHES = 4


def output_layer(limit: int, **options: Any) -> Any:
    config = model_config(**options)
    # The configuration allows this only with pipeline stages and Apex; the layer reads it at call time.
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, limit
    layer = make("column", config, embedding_activation_buffer=[], grad_output_buffer=[])
    layer.config.gradient_accumulation_fusion = layer.gradient_accumulation_fusion = True
    layer.weight.main_grad = torch.full(layer.weight.shape, 7.0)
    layer.weight.grad_added_to_main_grad = False
    return layer


def train(layer: Any) -> dict[str, torch.Tensor]:
    """All forwards, all backwards, then what Megatron does behind the pipeline."""
    from megatron.core.utils import drain_embedding_wgrad_compute

    rows = S if layer.sequence_parallel else S * dist.get_world_size()
    ranks_rows = dist.get_rank() if layer.sequence_parallel else 0
    found = {}
    inputs = [integers(rows, B, IN, seed=10 * i + ranks_rows).requires_grad_() for i in range(MICRO_BATCHES)]
    results = [layer(x)[0] for x in inputs]
    for i, (x, y) in enumerate(zip(inputs, results, strict=True)):
        y.backward(integers(*y.shape, seed=80 + 10 * i + dist.get_rank()))
        found |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
    assert layer.weight.grad_added_to_main_grad
    assert layer.weight.grad is not None, "no hook of data parallelism runs"
    found["in backward"] = layer.weight.main_grad.clone()
    found |= {f"dy{i}": dy for i, dy in enumerate(layer.grad_output_buffer)}
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, dy, main_grad: accumulate(main_grad, dy, x))
    with mock.patch.dict(sys.modules, {"fused_weight_gradient_mlp_cuda": kernels}):
        drain_embedding_wgrad_compute(
            layer.config, layer.embedding_activation_buffer, layer.grad_output_buffer, layer.weight, layer.tp_group
        )
    return found | {"main_grad": layer.weight.main_grad}


@pytest.mark.parametrize(("limit", "sequence_parallel"), [(0, True), (2, True), (0, False), (3, False)])
@on_ranks("world2")
def test_dy_is_left_for_megatron(limit: int, sequence_parallel: bool) -> None:
    """Beyond the limit backward computes wgrad, and only then gathers its input."""
    options = {"sequence_parallel": sequence_parallel}
    with megatron(tp=dist.get_world_size()), gradient_accumulation_fusion():
        stock = train(output_layer(limit, **options))
        with flux(STRICT) as seen:
            ours = train(output_layer(limit, **options))
    assert sum(name[:2] == "dy" for name in stock) == (limit or MICRO_BATCHES)
    assert (stock["in backward"] == 7).all() == (limit == 0)
    require_equal(ours, stock)
    assert seen.fallbacks == {}
    operators = ["all_gather_gemm", "gemm_reduce_scatter"] if sequence_parallel else ["gemm_all_reduce"]
    calls = {f"{name}/reference": MICRO_BATCHES for name in operators}
    if limit and sequence_parallel:
        calls["all_gather/reference"] = MICRO_BATCHES - limit
    assert seen.calls == calls


@on_ranks("world2")
def test_nowhere_to_add_it() -> None:
    """Stock's own error, since what is taken away is what Megatron adds to."""
    with megatron(tp=dist.get_world_size()), flux(STRICT):
        layer, x = output_layer(0), integers(S, B, IN, seed=3)
        with torch.no_grad():
            layer(x)
        del layer.weight.main_grad
        with pytest.raises(FallbackError, match="without main_grad"):
            layer(x)
