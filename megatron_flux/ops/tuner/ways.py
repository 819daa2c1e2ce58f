"""Ways to measure a gemm_all_reduce as it will run: beside a wgrad, and inside CUDA graphs.

A column-parallel layer's dgrad is reduced while its wgrad runs. A way that needs no SM for that may win although it is
slower by itself, and stock's costs nothing but what it takes from wgrad. So such a call is measured with a GEMM of
wgrad's size between its begin and its wait.

Calls of few rows take the host longer than the GPU. So those that will be captured are measured in graphs of
:data:`CALLS` calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_flux.comm.collectives import Pending
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import random_pair
from megatron_flux.ops.gemm import fp8_gemm

CALLS = 10

Way = Callable[[], Any]


def beside_wgrad(call: OperatorCall, ways: Mapping[str, Way]) -> dict[str, Way]:
    """Add to each way the wgrad of its layer: ``dy.T @ x`` with dy ``[m, k]`` of the call and x ``[m, n]``."""
    generator = torch.Generator(device=call.x.device).manual_seed(0)  # training's numbers stay what they were
    if call.fp8 is None:
        dy, x = call.matrix().x, call.x.new_empty(call.m, call.n).normal_(generator=generator)
        wgrad = functools.partial(torch.matmul, dy.t(), x)
    else:  # of both transposed, as FP8 has them
        kind = call.fp8.kind._replace(promoted=True)
        pair = random_pair(call.k, call.n, call.m, kind, call.x.device, generator)
        wgrad = functools.partial(fp8_gemm, pair)

    def beside(way: Way) -> Way:
        def both() -> None:
            pending = way()
            wgrad()
            if isinstance(pending, Pending):
                pending.wait()

        return both

    return {name: beside(way) for name, way in ways.items()}


def in_graphs(ways: Mapping[str, Way]) -> dict[str, Way]:
    """Return replays of graphs with :data:`CALLS` calls of each way, which have all been made in captured mode."""

    def captured(way: Way) -> Way:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                result = way()
                if isinstance(result, Pending):
                    result.wait()
        return graph.replay

    return {name: captured(way) for name, way in ways.items()}
