"""The norm and column-parallel linear in one function, against torch's norm before the plain column-parallel linear."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_flux.layers import keep
from tests.distributed.data import TOLERANCE, normals, require_close
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


class RMSNorm:
    """A norm without mean and bias."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        assert bias is None
        reciprocal = (x.square().mean(-1) + EPS).rsqrt()
        return x * reciprocal[:, None] * weight, None, reciprocal

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: Any, reciprocal_deviation: torch.Tensor
    ) -> Any:
        assert mean is None
        normed, d = x * reciprocal_deviation[:, None], dy * weight
        dx = reciprocal_deviation[:, None] * (d - normed * (d * normed).mean(-1, keepdim=True))
        return dx, (dy * normed).sum(0), None


def operands(kind: str, bias: bool, frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor | None]:
    rank = dist.get_rank()
    made = {
        "x": normals(S_PER_RANK, B, K, seed=1 + rank),
        "norm_weight": 1 + 0.3 * normals(K, seed=2),
        "norm_bias": normals(K, seed=3) if kind == "LayerNorm" else None,
        "weight": normals(N, K, seed=40 + rank),
        "bias": normals(N, seed=50 + rank) if bias else None,
    }
    return {name: t if t is None else t.requires_grad_(name not in frozen) for name, t in made.items()}


def ours(kind: str, o: dict[str, Any], **options: Any) -> torch.Tensor:
    from megatron_flux.layers import column_parallel_linear

    norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[kind](), o["norm_weight"], o["norm_bias"]
    return column_parallel_linear(o["x"], o["weight"], o["bias"], dist.group.WORLD, norm=norm, **options)


def sequential(kind: str, o: dict[str, Any], **options: Any) -> torch.Tensor:
    from megatron_flux.layers import column_parallel_linear

    x, weight = o["x"], o["norm_weight"]
    normed = (
        F.layer_norm(x, [K], weight, o["norm_bias"], EPS) if kind == "LayerNorm" else F.rms_norm(x, [K], weight, EPS)
    )
    return column_parallel_linear(normed, o["weight"], o["bias"], dist.group.WORLD, **options)


def gradients(o: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.grad for name, t in o.items() if t is not None and t.grad is not None}


@on_ranks("world2")
def test_an_input_that_is_not_contiguous() -> None:
    o = operands("LayerNorm", False)
    wide = normals(S_PER_RANK, B, 2 * K, seed=9)
    o["x"] = wide[:, :, :K].requires_grad_()
    assert not o["x"].is_contiguous()
    require_close("y", ours("LayerNorm", o).detach(), sequential("LayerNorm", o).detach(), TOLERANCE)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks("world2")
def test_nothing_gathered_is_saved(frozen: bool) -> None:
    """Elements saved for backward, the weight's left out."""
    m = S_PER_RANK * B
    input_and_output = m * K * (1 if frozen else 2)
    o = operands("LayerNorm", True, ("weight", "bias") if frozen else ())
    saved: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() != o["weight"].untyped_storage().data_ptr():
            saved[t.untyped_storage().data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = ours("LayerNorm", o)
    y.sum().backward()
    assert sum(saved.values()) == input_and_output + K + 2 * m


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@on_ranks("world2")
def test_the_gathered_output_of_the_norm_can_be_kept(kind: str) -> None:
    dy = normals(S_PER_RANK * dist.get_world_size(), B, N, seed=60 + dist.get_rank())
    found = []
    for keeps in (False, True):
        o = operands(kind, True)
        y = ours(kind, o, backend="reference", keep_gathered=keeps)
        assert keep.report()["inputs"] == keeps
        y.backward(dy)
        assert keep.report()["inputs"] == 0
        found.append(gradients(o))
    plain, kept = found
    for name, gradient in plain.items():
        assert torch.equal(kept[name], gradient), name
