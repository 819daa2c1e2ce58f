"""Layers between flux and stock: sequence parallelism that is toggled, stock beside flux, and the deferred wgrad of the
output layer (``defer_embedding_wgrad_compute``).
"""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, set_backend
from megatron_flux.layers import prefetch
from megatron_flux.layers.backward import accumulate
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed.data import integers, require_close, require_equal
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import on_ranks

S, B, IN, OUT = 4, 2, 8, 12


def make(kind: str, config: Any, **options: Any) -> torch.nn.Module:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    cls = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind]
    common = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": True}
    if kind == "row":
        common["input_is_parallel"] = True
    layer = cls(IN, OUT, **{**common, **options})
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=50 + i))
    return layer


def results(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x)[0]
    y.backward(integers(*y.shape, seed=8 + dist.get_rank(), dtype=y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def width_of(kind: str) -> int:
    return IN if kind == "column" else IN // dist.get_world_size()


@pytest.mark.parametrize("kind", ["column", "row"])
@on_ranks("world2")
def test_sequence_parallelism_toggled(kind: str) -> None:
    """Megatron switches sequence parallelism of built layers off for inference, and on again."""
    with megatron(tp=dist.get_world_size()):
        layer = make(kind, model_config())
        x = integers(S, B, width_of(kind), seed=3 + dist.get_rank())
        stock = {}
        for state in (True, False):
            layer.sequence_parallel = state
            stock[state] = results(layer, x)
        with flux() as seen:
            for state in (True, False, True):
                layer.sequence_parallel = state
                for ours, expected in zip(results(layer, x), stock[state], strict=True):
                    require_close(f"with sequence parallelism {state}", ours, expected, 0)
        calls = {f"{name}/reference": 2 for name in ("all_gather_gemm", "gemm_reduce_scatter")}
        more = {"all_gather/reference": 2} if kind == "column" else {"gemm_all_reduce/reference": 1}
        assert seen.fallbacks == {}
        assert (seen.active_layers, seen.calls) == (1, calls | more)
        layer.sequence_parallel = False
        with flux(FluxConfig(strict=True)) as seen, torch.inference_mode():
            require_close("y without gradients", layer(x)[0], stock[False][0], 0)
        assert (seen.active_layers, seen.calls) == (1, {} if kind == "column" else more)


@pytest.mark.parametrize(("kind", "chosen"), [("column", True), ("row", False)], ids=["chosen", "not supported"])
@on_ranks("world2")
def test_a_stock_layer_ends_a_prefetch(kind: str, chosen: bool) -> None:
    """No pair reaches across a layer of ``kind`` that runs stock, whether or not somebody has chosen so."""
    with megatron(tp=dist.get_world_size()):
        column, between = make("column", model_config()), make(kind, model_config())
        if chosen:
            set_backend(torch.nn.ModuleDict({"between": between}), "stock")
        else:
            between.explicit_expert_comm = True
        x = integers(S, B, IN, seed=3).requires_grad_()
        other = integers(S, B, width_of(kind), seed=4)
        held: list[Any] = []
        with flux() as seen:
            held.append(column(x))
            assert prefetch.take(column.tp_group) is not None, "nothing was registered: nothing can be ended"
            held.append(column(x))
            held.append(between(other))
            assert prefetch.take(column.tp_group) is None
        assert list(seen.fallbacks.values()) == [1]


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
