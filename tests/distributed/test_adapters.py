"""The linears that adapters are made of, ranks of 8 to 64: patched against stock, to the bit, and on fused kernels."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from tests.distributed import te_stand_in
from tests.distributed.data import integers
from tests.distributed.megatron_world import flux, megatron, model_config
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron
from tests.distributed.twins import PLANS, registered

S, B, WIDTH = 8, 2, 32
RANKS = (8, 16, 64)

on_twin = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def local(kind: str, rank: int, frozen: bool = False, **options: Any) -> Callable[[], torch.nn.Module]:
    """A linear of megatron-core's own into ``rank`` numbers ("in") or out of them, as Megatron-Bridge builds it."""

    def make() -> torch.nn.Module:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        config = model_config(sequence_parallel=False, params_dtype=torch.bfloat16)
        common = {"config": config, "init_method": config.init_method, "bias": False}
        sizes = (rank, WIDTH) if kind == "out" else (WIDTH, rank)
        if kind == "row in":
            layer = RowParallelLinear(*sizes, input_is_parallel=True, skip_bias_add=True, **common)
        else:
            layer = ColumnParallelLinear(*sizes, gather_output=kind == "column in", **common, **options)
        return filled(layer, frozen)

    return make


def over_te(kind: str, rank: int) -> Callable[[], torch.nn.Module]:
    """A linear over TransformerEngine with sequence parallelism, as mcore-bridge builds it."""

    def make() -> torch.nn.Module:
        from megatron.core.extensions import transformer_engine as extension

        config = model_config(params_dtype=torch.bfloat16, bf16=True)
        common = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False}
        if kind == "row in":
            layer = extension.TERowParallelLinear(WIDTH, rank, input_is_parallel=True, skip_bias_add=True, **common)
        else:
            layer = extension.TEColumnParallelLinear(rank, WIDTH, gather_output=False, skip_bias_add=False, **common)
        return filled(layer)

    return make


def filled(layer: torch.nn.Module, frozen: bool = False) -> torch.nn.Module:
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


def rank_same(make: str, how: dict[str, Any], backend: str) -> dict[str, int]:
    with (te_megatron if make == "over_te" else megatron)(dist.get_world_size()), registered(PLANS["halves of tiles"]):
        layer = {"local": local, "over_te": over_te}[make](**how)()
        rows = S * (dist.get_world_size() if make == "over_te" and how["kind"] == "row in" else 1)
        x = integers(rows, B, layer.weight.shape[1], seed=3 + dist.get_rank(), dtype=torch.bfloat16, high=1)
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
    for rank in RANKS:
        for calls in world2.run(rank_same, "local", how | {"rank": rank}, "reference"):
            assert calls == {f"{name}/reference": 1 for name in operators}


@on_twin
@pytest.mark.parametrize("kind", ["column in", "out", "row in"])
def test_megatron_bridge_on_fused_kernels(world2: WorkerPool, kind: str) -> None:
    for rank in RANKS[:2]:
        for calls in world2.run(rank_same, "local", {"kind": kind, "rank": rank}, "twin"):
            assert calls == {"gemm_all_reduce/twin": 1}


@te_stand_in.needed
@pytest.mark.parametrize("kind", ["out", "row in"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("twin", marks=on_twin)])
def test_mcore_bridge(te_world2: WorkerPool, kind: str, backend: str) -> None:
    for rank in RANKS if backend == "reference" else RANKS[:1]:
        for calls in te_world2.run(rank_same, "over_te", {"kind": kind, "rank": rank}, backend):
            assert calls[f"all_gather_gemm/{backend}"] == calls[f"gemm_reduce_scatter/{backend}"] == 1
