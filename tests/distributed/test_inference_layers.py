"""Layers where no gradient is wanted: the operator alone, and nothing left behind that a later training would meet."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import ops
from megatron_flux.comm.group_state import state_of
from megatron_flux.layers import column_parallel_linear, keep, row_parallel_linear
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import normals
from tests.distributed.megatron_world import on_gpu
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON, TINY, registered

MODES = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


class Layers:
    """Two column layers and a row layer, with the group's gathered inputs kept."""

    def __init__(self) -> None:
        self.group, rank = dist.group.WORLD, dist.get_rank()
        shapes = {"x": (3, 2, 8), "first": (6, 8), "second": (8, 6), "row": (5, 8)}
        self.o = {
            name: normals(*of, seed=10 * i + rank).requires_grad_() for i, (name, of) in enumerate(shapes.items())
        }

    def forward(self) -> list[torch.Tensor]:
        o, how = self.o, {"backend": "reference", "keep_gathered": True}
        first = column_parallel_linear(o["x"], o["first"], None, self.group, **how)
        own = first.chunk(dist.get_world_size())[dist.get_rank()]
        second = column_parallel_linear(own.tanh(), o["second"], None, self.group, **how)
        return [first, second, row_parallel_linear(second.tanh(), o["row"], self.group, backend="reference")]


@pytest.mark.parametrize("mode", MODES)
@on_ranks("world2")
def test_the_operator_alone(mode: str) -> None:
    layers = Layers()
    ops.stats.reset()
    before = keep.report()["total"]
    expected = layers.forward()
    forward = dict(ops.stats.calls)
    total, gathers = keep.report()["total"], ops.all_gathers_begun(layers.group)
    assert total == before + 2, "nothing is kept: nothing could be seen"
    del expected[1:]
    ops.stats.reset()
    with MODES[mode]():
        found = layers.forward()
    assert dict(ops.stats.calls) == forward
    assert forward == {("all_gather_gemm", "reference"): 2, ("gemm_reduce_scatter", "reference"): 1}
    assert keep.report()["total"] == total
    assert ops.all_gathers_begun(layers.group) == gathers
    assert state_of(layers.group).column is None
    assert not any(y.requires_grad for y in found)
    with torch.enable_grad():
        for one, other in zip(found, layers.forward(), strict=True):
            assert torch.equal(one, other)


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
