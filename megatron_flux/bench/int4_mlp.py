"""Timing MLPs of few tokens in int4: folded, the plain tensor-parallel form, and bf16, on the ranks' real collectives.

As a decode step runs them, in CUDA graphs (on CPUs without): a graph holds :data:`CALLS` calls over as many MLPs as
have more bytes than the L2 cache, as the layers of a model do. Arms take turns, in another order every round; a time
is the slowest rank's, per MLP. Weights are random, in 4 bits with an activation order: times do not depend on values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.ops import timing
from megatron_flux.quant.fold import MLP, activate, fold, joined, shard
from megatron_flux.quant.gptq import round_to_nearest
from megatron_flux.quant.layers import FoldedMLP, NaiveMLP, activated

TOKENS = (1, 2, 4, 8, 16)
GROUP_SIZE = 128
CALLS, REPLAYS, ROUNDS = 8, 4, 9
COLD_BYTES = 100 << 20
"""Of the int4 weights that a graph reads: twice the L2 cache of an H200."""

ARMS = ("naive_int4", "folded_int4", "bf16")
STOCK = "naive_int4"
"""What ``speedup_vs_stock`` is over: the paper's comparison."""


class Shape(NamedTuple):
    """An MLP of a whole model."""

    hidden: int
    ffn: int
    gated: bool
    activation: str


MODELS = {
    "granite-20b": Shape(6144, 24576, False, "gelu"),
    "llama-70b": Shape(8192, 28672, True, "silu"),
    "tiny": Shape(256, 1024, True, "silu"),
}


def random_mlp(shape: Shape, device: torch.device, seed: int) -> MLP:
    """A quantised MLP, the same on all ranks."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def linear(n: int, k: int, order: torch.Tensor, name: str) -> Any:
        weight = torch.empty(n, k, device=device).normal_(std=k**-0.5, generator=generator)
        return round_to_nearest(weight, GROUP_SIZE, order, name=name)

    def order(k: int) -> torch.Tensor:
        return torch.randperm(k, device=device, generator=generator)

    shared = order(shape.hidden)
    names = ("gate", "up") if shape.gated else ("fc1",)
    first = tuple(linear(shape.ffn, shape.hidden, shared, name) for name in names)
    return MLP(first, linear(shape.hidden, shape.ffn, order(shape.ffn), "down"))


class Bf16MLP:
    """The rank's part of the folded MLP, dequantised: what int4 is also compared with."""

    def __init__(self, mlp: MLP, group: dist.ProcessGroup, activation: str) -> None:
        part = shard(fold(mlp, group.size()), group.rank(), group.size())
        self._first = joined(part.first).dequantize().to(torch.bfloat16)
        self._second = part.second.dequantize().to(torch.bfloat16)
        self._gated, self._activation, self._group = mlp.gated, activate(activation), group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As :class:`FoldedMLP`."""
        inner = activated(torch.nn.functional.linear(x, self._first), self._gated, self._activation)
        y = torch.nn.functional.linear(inner, self._second)
        dist.all_reduce(y, group=self._group)
        return y


def rows(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    models: Sequence[str] = ("granite-20b", "llama-70b"),
    ms: Sequence[int] = TOKENS,
    rounds: int = ROUNDS,
    go_on: Callable[[], bool] = lambda: True,
) -> list[dict[str, Any]]:
    """One row per model, m and arm, with the medians and the raw rounds; collective.

    ``go_on`` says, alike on all ranks, whether another model or m is to be measured. Each row is ``{"kind":
    "int4_mlp", "model", "m", "arm", "ms", "speedup_vs_stock", "rounds_ms", "error"}``: ``error`` is how far, relative
    to its norm, the arm's result is from bf16's.
    """
    found: list[dict[str, Any]] = []
    for model in models:
        if not go_on():
            break
        shape = MODELS[model]
        nbytes = (3 if shape.gated else 2) * shape.hidden * shape.ffn // 2 // group.size()
        count = min(CALLS, max(1, -(-COLD_BYTES // nbytes))) if device.type == "cuda" else 1
        arms: dict[str, list[Any]] = {arm: [] for arm in ARMS}
        for layer in range(count):
            mlp = random_mlp(shape, device, layer)
            arms["naive_int4"].append(NaiveMLP(mlp, group, activation=shape.activation, device=device))
            arms["folded_int4"].append(FoldedMLP(mlp, group, activation=shape.activation, device=device))
            arms["bf16"].append(Bf16MLP(mlp, group, shape.activation))
            del mlp
        generator = torch.Generator(device=device).manual_seed(0)
        for m in ms:
            if not go_on():
                break
            x = torch.empty(m, shape.hidden, device=device).normal_(generator=generator).to(torch.bfloat16)
            found += _case(model, x, arms, group, device, rounds)
    return found


def _case(
    model: str, x: torch.Tensor, arms: dict[str, list[Any]], group: dist.ProcessGroup, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    with torch.no_grad():
        exact = arms["bf16"][0](x).float()
        errors = {arm: float((mlps[0](x).float() - exact).norm() / exact.norm()) for arm, mlps in arms.items()}
        ways = {arm: _way(mlps, x) for arm, mlps in arms.items()}
        samples = timing.rounds(ways, group, device, rounds, REPLAYS if device.type == "cuda" else 1)
    by_arm = {arm: [ms / CALLS for ms in found.ms] for arm, found in samples.items()}
    stock = statistics.median(by_arm[STOCK])
    return [
        {
            **{"kind": "int4_mlp", "model": model, "m": x.shape[0], "arm": arm},
            "ms": round(statistics.median(ms), 5),
            "speedup_vs_stock": round(stock / statistics.median(ms), 4),
            "rounds_ms": [round(one, 5) for one in ms],
            "error": errors[arm],
        }
        for arm, ms in by_arm.items()
    ]


def _way(mlps: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> Callable[[], Any]:
    """:data:`CALLS` calls in turn; on a GPU the replay of a graph of them."""

    def calls() -> None:
        for turn in range(CALLS):
            mlps[turn % len(mlps)](x)

    if not x.is_cuda:
        return calls
    for _ in range(2):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()
    return graph.replay
