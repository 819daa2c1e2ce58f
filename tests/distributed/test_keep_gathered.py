"""Keeping gathered inputs for wgrad: same numbers to the bit, fewer gathers, a budget. Where no gradient is wanted
nothing is left behind that a later training would meet.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, ops
from megatron_flux.comm.group_state import state_of
from megatron_flux.config import Backends
from megatron_flux.layers import column_parallel_linear, keep, row_parallel_linear
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import normals, require_equal
from tests.distributed.megatron_world import FULL, flux, gpt_model, megatron, on_gpu, step
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, registered

ROWS, BATCH, HIDDEN = 2, 4, 8


def gathered_bytes() -> int:
    """Return the bytes of one gathered input of :class:`Block`."""
    return dist.get_world_size() * ROWS * BATCH * HIDDEN * 4


class Block:
    """Column, tanh, row; fp32."""

    def __init__(self, backend: Any = "reference", keeps: bool | None = True, budget: int | None = None) -> None:
        self.weights = [normals(2 * HIDDEN, HIDDEN, seed=1), normals(HIDDEN, 2 * HIDDEN, seed=2)]
        for weight in self.weights:
            weight.requires_grad_()
        self.backend, self.keeps, self.budget = backend, keeps, budget

    def column(self, x: torch.Tensor) -> torch.Tensor:
        return column_parallel_linear(
            x,
            self.weights[0],
            None,
            dist.group.WORLD,
            backend=self.backend,
            keep_gathered=self.keeps,
            keep_gathered_bytes=self.budget,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_parallel_linear(torch.tanh(self.column(x)), self.weights[1], dist.group.WORLD, backend=self.backend)

    def results(self, micro_batches: int = 3) -> tuple[list[torch.Tensor], int]:
        """Gradients after as many forwards and then as many backwards, and how many gathers these began."""
        begun = state_of(dist.group.WORLD).gathers_begun
        inputs = [normals(ROWS, BATCH, HIDDEN, seed=10 + i).requires_grad_() for i in range(micro_batches)]
        for y in [self.forward(x) for x in inputs]:
            y.square().sum().backward()
        gradients = [*(x.grad for x in inputs), *(weight.grad for weight in self.weights)]
        return gradients, state_of(dist.group.WORLD).gathers_begun - begun


def one_input() -> torch.Tensor:
    return normals(ROWS, BATCH, HIDDEN, seed=5).requires_grad_()


def held() -> tuple[int, int]:
    now = keep.report()
    return now["inputs"], now["bytes"]


@pytest.mark.parametrize("backend", ["reference", "chunked", "chunked_int8", "auto"])
@on_ranks("world")
def test_the_same_numbers_with_fewer_gathers(backend: str) -> None:
    plain, gathers = Block(backend, False).results()
    assert gathers == 3
    total = keep.report()["total"]
    found, gathers = Block(backend).results()
    assert gathers == 0
    assert keep.report()["total"] - total == 3
    require_equal(found, plain)
    assert held() == (0, 0)


@on_ranks("world2")
def test_two_backwards() -> None:
    """A second backward through a retained graph gathers; one for the input alone gives the memory back too."""
    block = Block()
    y = block.forward(one_input())
    y.sum().backward(retain_graph=True)
    first = block.weights[0].grad.clone()
    assert held() == (0, 0)
    begun = state_of(dist.group.WORLD).gathers_begun
    y.sum().backward()
    assert state_of(dist.group.WORLD).gathers_begun == begun + 1
    assert torch.equal(block.weights[0].grad, 2 * first)
    x = one_input()
    torch.autograd.grad(block.forward(x).sum(), [x])
    assert held() == (0, 0)


@on_ranks("world2")
def test_what_keeps_nothing() -> None:
    block, x, before = Block(), one_input(), keep.report()["total"]
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            block.column(x)
        assert state_of(dist.group.WORLD).column is None, "a later backward would gather for it"
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        block.column(x)
    for backends in (("chunked_int8", "auto", "reference"), ("reference", "auto", "chunked_int8")):
        Block(Backends(*backends)).column(x)  # wgrad would gather other numbers
    with registered():
        Block("twin").column(x)  # a slab, which the next call overwrites
    Block(keeps=False).column(x)
    block.weights[0].requires_grad_(False)
    block.column(x)
    assert keep.report()["total"] == before
    block.weights[0].requires_grad_(True)
    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(block.forward, x, use_reentrant=reentrant)
        assert held() == (0, 0), "nothing before backward runs forward again"
        y.sum().backward()
        assert held() == (0, 0)


@pytest.mark.parametrize(
    ("backend", "recompute"), [("reference", None), ("chunked", None), ("chunked", "selective"), ("reference", "full")]
)
@on_ranks("world2")
def test_whole_model(backend: str, recompute: str | None) -> None:
    options: dict[str, Any] = FULL if recompute == "full" else {"recompute_granularity": recompute} if recompute else {}
    with megatron(tp=dist.get_world_size()):
        model = gpt_model("llama", **options)
        with flux(FluxConfig(strict=True, backend=backend, keep_gathered=False)) as seen:
            plain = step(model)
        assert seen.calls[f"all_gather/{backend}"] == 2 * 2 + 1
        one = 4 * 32 * 16 * 2  # bytes of an input
        ways: list[tuple[dict[str, Any], int]] = [({"keep_gathered": True}, 0)]
        if not options:  # by default where chunked runs; the budget with either way to gather the others
            ways += [({}, 0 if backend == "chunked" else 5), ({"keep_gathered_bytes": 0}, 5)]
            ways += [
                ({"keep_gathered": True, "keep_gathered_bytes": 2 * one, "gather_ahead": g}, 3) for g in (True, False)
            ]
        for given, gathers in ways:
            with flux(FluxConfig(strict=True, backend=backend, **given)) as seen:
                require_equal(step(model), plain)
            assert seen.calls.get(f"all_gather/{backend}", 0) == gathers, given
            assert held() == (0, 0)


class Pair:
    """A column and a row layer in bf16 on a group, on GPUs where the ranks have some."""

    def __init__(self, group: Any, backend: str, rows: int = 16, width: int = 32) -> None:
        self.group, self.backend, rank = group, backend, dist.get_rank()
        self.x = self.made(rows, width, seed=1 + rank)
        self.weights = [self.made(width, width, seed=20 + rank), self.made(width, width, seed=30 + rank)]

    def made(self, *shape: int, seed: int) -> torch.Tensor:
        made = normals(*shape, seed=seed, dtype=torch.bfloat16)
        return made.cuda() if on_gpu() else made

    def forward(self, x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = column_parallel_linear(x, weights[0], None, self.group, backend=self.backend).tanh()
        y = row_parallel_linear(hidden, weights[1], self.group, backend=self.backend)
        return y, ops.gemm_all_reduce(hidden, weights[1], self.group, backend=self.backend)

    def inference(self) -> list[torch.Tensor]:
        with torch.inference_mode():
            return list(self.forward(self.x, self.weights))

    def training(self) -> list[torch.Tensor]:
        """Return the results of :meth:`inference`, and all gradients."""
        x, *weights = leaves = [t.clone().requires_grad_() for t in (self.x, *self.weights)]
        y, whole = self.forward(x, weights)
        y.float().square().sum().backward()
        return [y.detach(), whole, *(leaf.grad for leaf in leaves)]


def check_workspaces(pair: Pair) -> None:
    """All that calls of the group need is made in inference mode; a training writes to it."""
    first = pair.inference()
    with torch.inference_mode():
        for _ in range(2):  # both halves of the workspace that wgrad's gathers have
            ops.all_gather(pair.x, pair.group, backend=pair.backend).wait()
    steps = [pair.training() for _ in range(3)]
    for found in (*steps[1:], first, pair.inference()):
        for one, other in zip(found, steps[0], strict=False):
            assert torch.equal(one, other)
    assert len(steps[0]) == 5
    assert all(gradient.any() for gradient in steps[0][2:])


@pytest.mark.parametrize("backend", ["chunked_int8", "auto", pytest.param("twin", marks=NEEDS_TRITON)])
@on_ranks("world2")
def test_workspaces_made_in_inference_mode_serve_a_training(backend: str) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    with registered(KernelConfig(**TINY)) if backend == "twin" else nullcontext():
        check_workspaces(Pair(group, backend))
    dist.destroy_process_group(group)
