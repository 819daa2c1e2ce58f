"""int4 MLPs over real process groups: the folded form, the naive one, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.quant.fold import MLP, forward
from megatron_flux.quant.gptq import round_to_nearest
from megatron_flux.quant.layers import FoldedMLP, NaiveMLP
from tests.distributed.pool import WorkerPool

HIDDEN, FFN, GROUP = 128, 512, 32
COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv", "batch_"))
    and callable(getattr(dist, name))
]


def made(gated: bool, bias: bool) -> MLP:
    """The same on all ranks."""
    seed = torch.Generator().manual_seed(3)

    def linear(n: int, k: int, order: torch.Tensor, name: str) -> Any:
        weight = torch.randn(n, k, generator=seed) / k**0.5
        return round_to_nearest(weight, GROUP, order, torch.randn(n, generator=seed) if bias else None, name)

    order = torch.randperm(HIDDEN, generator=seed)
    first = tuple(linear(FFN, HIDDEN, order, name) for name in (("gate", "up") if gated else ("fc1",)))
    return MLP(first, linear(HIDDEN, FFN, torch.randperm(FFN, generator=seed), "down"))


def rank_mlps(gated: bool, bias: bool) -> dict[str, Any]:
    group, mlp = dist.group.WORLD, made(gated, bias)
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    activation = "silu" if gated else "gelu"
    expected = forward(mlp, x, activation)
    found: dict[str, Any] = {}
    for kind in (FoldedMLP, NaiveMLP):
        run = kind(mlp, group, activation=activation)
        sent: Counter[str] = Counter()
        with mock.patch.multiple(dist, **{name: counted(name, sent) for name in COLLECTIVES}):
            y = run(x)
        error = float((y.float() - expected).norm() / expected.norm())
        with torch.inference_mode():
            for one in (run, kind(mlp, group, activation=activation)):
                assert torch.equal(one(x.clone()), y)
        found[kind.__name__] = {"error": error, "sent": dict(sent), "y": y}
    return found


def counted(name: str, sent: Counter[str]) -> Any:
    original = getattr(dist, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        sent[name] += 1
        return original(*args, **kwargs)

    return call


@pytest.fixture(scope="module")
def one() -> Iterator[WorkerPool]:
    pool = WorkerPool(1)
    yield pool
    pool.stop()


@pytest.mark.parametrize(("gated", "bias"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_folded_mlp_gathers_nothing(
    one: WorkerPool, request: pytest.FixtureRequest, size: int, gated: bool, bias: bool
) -> None:
    ranks = (one if size == 1 else request.getfixturevalue(f"world{size}")).run(rank_mlps, gated, bias)
    for found in ranks:
        assert found["FoldedMLP"]["sent"] == {"all_reduce": 1}
        assert found["NaiveMLP"]["sent"] == {"all_gather_into_tensor": 1, "all_reduce": 1}
        for name, mlp in found.items():
            assert mlp["error"] < 2e-2
            assert torch.equal(mlp["y"], ranks[0][name]["y"])
