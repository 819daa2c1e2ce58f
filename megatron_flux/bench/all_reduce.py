"""Timing gemm_all_reduce of few rows: stock's GEMM and NCCL's all-reduce against flux's ways, all in CUDA graphs.

A decode step is a CUDA graph, in which a call costs what the GPU takes for it and no host time. So a graph of
:data:`CALLS` calls is captured of every arm, and the graphs are replayed in turns, in an order that changes every round
(:func:`megatron_flux.ops.timing.rounds`); a time is the slowest rank's. The calls of a graph read different weights, of
more bytes than the L2 cache holds, as the layers of a model do. On CPUs the calls are made one by one.

Arms: ``reference`` (cuBLAS, NCCL), ``gemm`` (cuBLAS alone: what no all-reduce can beat with that GEMM), ``auto`` (what
the tuner chose for calls in graphs), and configurations by their labels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.comm.collectives import Pending
from megatron_flux.ops import timing
from megatron_flux.ops.all_reduce_config import AllReduceConfig, candidates
from megatron_flux.ops.backends.registry import get_backend, select
from megatron_flux.ops.backends.tuner_calls import kind_of
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.gemm import gemm

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CALLS, REPLAYS, ROUNDS = 12, 4, 9
COLD_BYTES = 160 << 20
"""Of the weights that the calls of a graph read in turn: three times the L2 cache of an H200."""

Way = Callable[[], Any]


class Layer(NamedTuple):
    """A row-parallel layer on one rank."""

    model: str
    name: str
    n: int
    k: int


def layers(models: Sequence[str], tp: int) -> list[Layer]:
    """The projection and FC2 of ``models``, names of :data:`megatron_flux.bench.layer_config.LAYER_MODELS`."""
    shapes = [(name, LAYER_MODELS[name]) for name in models]
    return [
        Layer(name, layer, shape.hidden_size, width // tp)
        for name, shape in shapes
        for layer, width in (("proj", shape.hidden_size), ("fc2", shape.ffn_hidden_size))
    ]


def rows(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    models: Sequence[str] = ("llama-70b",),
    ms: Sequence[int] = ROWS,
    dtype: torch.dtype = torch.bfloat16,
    arms: Callable[[OperatorCall], Mapping[str, AllReduceConfig]] | None = None,
    rounds: int = ROUNDS,
    auto: bool = True,
    go_on: Callable[[], bool] = lambda: True,
) -> list[dict[str, Any]]:
    """One row per layer, m and arm, with the medians and the raw rounds; collective.

    ``arms``: configurations beside ``reference``, ``gemm`` and ``auto``; None is all that the tuner would measure.
    ``auto``: whether that is an arm, for which the tuner measures first.
    ``go_on`` says, alike on all ranks, whether another m is to be measured.

    Each row is ``{"kind": "gemm_all_reduce", "model", "layer", "m", "n", "k", "arm", "ms", "speedup_vs_stock",
    "rounds_ms", "chosen"}``; ``chosen`` is what ``auto`` ran.
    """
    found: list[dict[str, Any]] = []
    for layer in layers(models, group.size()):
        generator = torch.Generator(device=device).manual_seed(group.rank())
        cold = -(-COLD_BYTES // (layer.n * layer.k * dtype.itemsize)) if device.type == "cuda" else 0
        weights = [
            torch.empty(layer.n, layer.k, dtype=dtype, device=device).normal_(generator=generator)
            for _ in range(min(max(2, cold), CALLS))
        ]
        for m in ms:
            if not go_on():
                return found
            x = torch.empty(m, layer.k, dtype=dtype, device=device).normal_(generator=generator)
            found += _case(layer, x, weights, group, device, arms or _candidates, rounds, auto)
    return found


def _candidates(call: OperatorCall) -> dict[str, AllReduceConfig]:
    listed = candidates(call.m, call.n, call.k, call.group.size(), call.x.element_size())
    return {config.label(): config for config in listed}


def _case(
    layer: Layer,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    arms: Callable[[OperatorCall], Mapping[str, AllReduceConfig]],
    rounds: int,
    auto: bool,
) -> list[dict[str, Any]]:
    call = OperatorCall("gemm_all_reduce", x, weights[0], group)
    fused = get_backend("fused")

    def made(backend: str) -> Callable[[torch.Tensor], Any]:
        return lambda w: ops.gemm_all_reduce(x, w, group, backend=backend)

    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "reference": made("reference"),
        "gemm": lambda w: gemm(x, w, transposed=False),
    }
    if auto:
        calls["auto"] = made("auto")
        with captured_calls():
            select("auto", x, weights[0], group).decide(call)  # for this m itself, whatever was measured of others
    for label, config in arms(call).items():
        if config.fits(call.m, call.n, group.size(), x.element_size()):
            calls[label] = lambda w, config=config: call._replace(weight=w).run(fused, config=config)
    with torch.no_grad():
        ways = {label: in_graph(one, weights) for label, one in calls.items()}
        samples = timing.rounds(ways, group, device, rounds, REPLAYS if device.type == "cuda" else 1)
    by_arm = {label: [ms / CALLS for ms in found.ms] for label, found in samples.items()}
    stock = statistics.median(by_arm["reference"])
    return [
        {
            "kind": "gemm_all_reduce",
            **{"model": layer.model, "layer": layer.name, "m": call.m, "n": layer.n, "k": layer.k, "arm": label},
            "ms": round(statistics.median(ms), 5),
            "speedup_vs_stock": round(stock / statistics.median(ms), 4),
            "rounds_ms": [round(one, 5) for one in ms],
            "chosen": chosen(call) if label == "auto" and x.is_cuda else None,
        }
        for label, ms in by_arm.items()
    ]


def in_graph(call: Callable[[torch.Tensor], Any], weights: Sequence[torch.Tensor]) -> Way:
    """The replay of a graph of :data:`CALLS` of ``call``, each with the next of ``weights``; on CPUs the calls."""
    if not weights[0].is_cuda:

        def calls() -> None:
            for turn in range(CALLS):
                timing.finish(call(weights[turn % len(weights)]))

        return calls
    with captured_calls():
        for turn in range(3):  # both halves of a workspace, and what a library allocates on its first calls
            timing.finish(call(weights[turn % len(weights)]))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for turn in range(CALLS):
            found = call(weights[turn % len(weights)])
            if isinstance(found, Pending):
                found.wait()
    return graph.replay


def chosen(call: OperatorCall) -> str | None:
    """What the tuner took for ``call`` in graphs, None where ``auto`` is not the tuner."""
    tuned = get_backend("tuned")
    with captured_calls():
        found = tuned.decisions(call.group).choices.get(kind_of(call))  # type: ignore[attr-defined]
    if found is None:
        return None
    return found.backend if found.config is None else f"{found.backend} {found.config.label()}"
