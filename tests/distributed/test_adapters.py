"""The linears that adapters are made of, ranks of 8 to 64: patched against stock, to the bit, and on fused kernels."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from tests.distributed.data import integers
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import WorkerPool
from tests.distributed.twins import NEEDS_TRITON, PLANS, registered

S, B, WIDTH = 8, 2, 32
RANKS = (8, 16, 64)


def local(kind: str, rank: int, frozen: bool = False, **options: Any) -> torch.nn.Module:
    """A linear of megatron-core's own into ``rank`` numbers ("in") or out of them, as Megatron-Bridge builds it."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    config = model_config(sequence_parallel=False, params_dtype=torch.bfloat16)
    common = {"config": config, "init_method": config.init_method, "bias": False}
    sizes = (rank, WIDTH) if kind == "out" else (WIDTH, rank)
    if kind == "row in":
        layer = RowParallelLinear(*sizes, input_is_parallel=True, skip_bias_add=True, **common)
    else:
        layer = ColumnParallelLinear(*sizes, gather_output=kind == "column in", **common, **options)
    with torch.no_grad():
        layer.weight.copy_(integers(*layer.weight.shape, seed=50 + dist.get_rank(), dtype=torch.bfloat16, high=1))
    layer.weight.requires_grad_(not frozen)
    return layer


def results(layer: torch.nn.Module, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = layer(x)[0]
    y.backward(integers(*y.shape, seed=8 + dist.get_rank(), dtype=y.dtype, high=1))
    yield from (("y", y.detach()), ("dx", x.grad))
    if layer.weight.requires_grad:
        yield "dw", layer.weight.grad


def rank_same(how: dict[str, Any], backend: str) -> dict[str, int]:
    with megatron(dist.get_world_size()), registered(PLANS["halves of tiles"]):
        layer = local(**how)
        x = integers(S, B, layer.weight.shape[1], seed=3 + dist.get_rank(), dtype=torch.bfloat16, high=1)
        stock = dict(results(layer, x))
        with flux(FluxConfig(strict=True, backend=backend)) as seen:
            ours = dict(results(layer, x))
        assert ours.keys() == stock.keys()
        for name, expected in stock.items():
            assert torch.equal(ours[name], expected), name
        assert (seen.active_layers, seen.fallbacks) == (1, {})
        return seen.calls


LOCAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    # what it is built with, and the operators that it runs
    "column in, input gathered for it": ({"kind": "column in", "disable_grad_reduce": True}, []),
    "the same, frozen": ({"kind": "column in", "disable_grad_reduce": True, "frozen": True}, []),
    "column in": ({"kind": "column in"}, ["gemm_all_reduce"]),
    "out": ({"kind": "out"}, ["gemm_all_reduce"]),
    "row in": ({"kind": "row in"}, ["gemm_all_reduce"]),
}


@pytest.mark.parametrize(("how", "operators"), LOCAL.values(), ids=LOCAL)
def test_megatron_bridge(world2: WorkerPool, how: dict[str, Any], operators: list[str]) -> None:
    for rank in RANKS[::2]:
        for calls in world2.run(rank_same, how | {"rank": rank}, "reference"):
            assert calls == {f"{name}/reference": 1 for name in operators}


@NEEDS_TRITON
@pytest.mark.parametrize("kind", ["column in", "out", "row in"])
def test_megatron_bridge_on_fused_kernels(world2: WorkerPool, kind: str) -> None:
    for rank in RANKS[1:2]:
        for calls in world2.run(rank_same, {"kind": kind, "rank": rank}, "twin"):
            assert calls == {"gemm_all_reduce/twin": 1}
