"""The norm and column-parallel linear in one function, against torch's norm before the plain column-parallel linear."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_flux.layers import column_parallel_linear, keep
from tests.distributed.data import TOLERANCE, normals, require_close, require_equal
from tests.distributed.pool import on_ranks

S_PER_RANK, B, K, N = 3, 2, 8, 6
EPS = 1e-5


class LayerNorm:
    """Torch's own kernels, forward and backward apart."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        assert x.is_contiguous()
        y, mean, reciprocal_deviation = torch.ops.aten.native_layer_norm(x, [K], weight, bias, EPS)
        return y, mean, reciprocal_deviation

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: Any, reciprocal_deviation: torch.Tensor
    ) -> Any:
        assert dy.shape == x.shape
        bias = torch.zeros_like(weight)
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, [K], mean, reciprocal_deviation, weight, bias, [True, True, True]
        )


def operands(frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    made = {
        "x": normals(S_PER_RANK, B, K, seed=1 + rank),
        "norm_weight": 1 + 0.3 * normals(K, seed=2),
        "norm_bias": normals(K, seed=3),
        "weight": normals(N, K, seed=40 + rank),
        "bias": normals(N, seed=50 + rank),
    }
    return {name: t.requires_grad_(name not in frozen) for name, t in made.items()}


def ours(o: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    norm = LayerNorm(), o["norm_weight"], o["norm_bias"]
    return column_parallel_linear(o["x"], o["weight"], o["bias"], dist.group.WORLD, norm=norm, **options)


@on_ranks("world2")
def test_an_input_that_is_not_contiguous() -> None:
    o = operands()
    o["x"] = normals(S_PER_RANK, B, 2 * K, seed=9)[:, :, :K].requires_grad_()
    assert not o["x"].is_contiguous()
    normed = F.layer_norm(o["x"], [K], o["norm_weight"], o["norm_bias"], EPS)
    expected = column_parallel_linear(normed, o["weight"], o["bias"], dist.group.WORLD)
    require_close("y", ours(o).detach(), expected.detach(), TOLERANCE)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks("world2")
def test_nothing_gathered_is_saved(frozen: bool) -> None:
    """Elements saved for backward, the weight's left out."""
    m = S_PER_RANK * B
    input_and_output = m * K * (1 if frozen else 2)
    o = operands(("weight", "bias") if frozen else ())
    saved: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() != o["weight"].untyped_storage().data_ptr():
            saved[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = ours(o)
    y.sum().backward()
    assert sum(saved.values()) == input_and_output + K + 2 * m


@on_ranks("world2")
def test_the_gathered_output_of_the_norm_can_be_kept() -> None:
    dy = normals(S_PER_RANK * dist.get_world_size(), B, N, seed=60 + dist.get_rank())
    found = []
    for keeps in (False, True):
        o = operands()
        y = ours(o, backend="reference", keep_gathered=keeps)
        assert keep.report()["inputs"] == keeps
        y.backward(dy)
        assert keep.report()["inputs"] == 0
        found.append({name: t.grad for name, t in o.items()})
    require_equal(*reversed(found))
