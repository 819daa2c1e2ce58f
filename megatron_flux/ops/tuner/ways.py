"""Ways to measure a gemm_all_reduce as it will run: prepared, beside a wgrad, and inside CUDA graphs.

A column-parallel layer's dgrad is reduced while its wgrad runs. A way that needs no SM for that may win although it is
slower by itself, and stock's costs nothing but what it takes from wgrad. So such a call is measured with a GEMM of
wgrad's size between its begin and its wait.

Calls of few rows take the host longer than the GPU. So they are measured as calls that have been made before are
(:mod:`megatron_flux.ops.fast_path`), and those that will be captured in graphs of :data:`CALLS` calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops import fast_path
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import random_pair
from megatron_flux.ops.gemm import fp8_gemm

CALLS = 10

Way = Callable[[], Any]


@dataclass(frozen=True)
class Planned:
    """A backend, as far as it prepares calls, with ``config`` for all of them.

    Calls so prepared stay in the group's table until :meth:`forget`, or until a slab is replaced.
    """

    backend: Any
    config: AllReduceConfig
    name = "fused"

    def prepare(self, call: OperatorCall, shape: tuple[int, ...]) -> Any:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        return self.backend.prepare(call, shape, self.config)

    def way(self, call: OperatorCall, first: Way) -> Way:
        """Return ``first``, which makes ``call``, as a way that is prepared as soon as that can be."""
        state = state_of(call.group)

        def again() -> Any:
            found = fast_path.find(state, self, call.x, call.weight)
            if found is not None:
                return found.call(call.x, call.weight)
            result = first()
            fast_path.remember(self, self, call, (call.m, call.n), 0)
            return result

        return again

    def forget(self, call: OperatorCall) -> None:
        """Drop the prepared calls: ``call`` is measured."""
        state_of(call.group).prepared.pop(self, None)


def beside_wgrad(call: OperatorCall, ways: Mapping[str, Way]) -> dict[str, Way]:
    """Add to each way the wgrad of its layer: ``dy.T @ x`` with dy ``[m, k]`` of the call and x ``[m, n]``."""
    generator = torch.Generator(device=call.x.device).manual_seed(0)  # training's numbers stay what they were
    if call.fp8 is None:
        dy, x = call.x, call.x.new_empty(call.m, call.n).normal_(generator=generator)
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
                found = way()
                if isinstance(found, Pending):
                    found.wait()
        return graph.replay

    return {name: captured(way) for name, way in ways.items()}
