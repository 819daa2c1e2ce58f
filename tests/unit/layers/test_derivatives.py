"""The layers' derivatives: the second one is refused, autocast in backward alone changes nothing; prefetches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_flux import UserError
from megatron_flux.layers import column_parallel_linear, prefetch, row_parallel_linear
from tests.unit.groups import group_of

K, N = 24, 40


class Scale:
    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, ...]:
        return x * weight, None, x.new_ones(len(x))

    def backward(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        return dy * weight, (dy * x).sum(0), None


LAYERS: dict[str, Callable[..., torch.Tensor]] = {
    "column": lambda x, w: column_parallel_linear(x, w, None, group_of(1), backend="reference"),
    "row": lambda x, w: row_parallel_linear(x, w, group_of(1), backend="reference"),
    "norm column": lambda x, w: column_parallel_linear(
        x, w, None, group_of(1), norm=(Scale(), torch.ones(K), None), backend="reference"
    ),
}


@pytest.fixture(params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    return LAYERS[request.param]


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(5, 2, K, requires_grad=True), torch.randn(N, K, requires_grad=True), torch.randn(5, 2, N)


def test_a_second_derivative_is_refused(layer: Any, operands: tuple[torch.Tensor, ...]) -> None:
    x, w, _ = operands
    dx, dw = torch.autograd.grad(layer(x, w).square().sum(), (x, w), create_graph=True)
    plain = torch.autograd.grad((x @ w.t()).square().sum(), (x, w))
    torch.testing.assert_close((dx.detach(), dw.detach()), plain)
    for gradient in (dx, dw):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward(retain_graph=True)


def gradients(layer: Any, operands: tuple[torch.Tensor, ...], forward: bool, backward: bool) -> tuple[Any, ...]:
    x, w, dy = operands
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
        y = layer(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
        return torch.autograd.grad(y, (x, w), dy.to(y.dtype))


def test_autocast_around_backward_alone_changes_nothing(layer: Any, operands: tuple[torch.Tensor, ...]) -> None:
    plain, low = (gradients(layer, operands, False, on) for on in (False, True))
    assert all(torch.equal(*pair) for pair in zip(plain, low, strict=True))


def test_autocast_in_forward_holds_in_backward(operands: tuple[torch.Tensor, ...]) -> None:
    """Only on operands of the dtype that it casts to: a weight in fp32 is refused for its dtype."""
    x, w, dy = (t.detach().bfloat16() for t in operands)
    given = x.requires_grad_(), w.requires_grad_(), dy
    for layer in (LAYERS["column"], LAYERS["row"]):
        seen: list[bool] = []
        x.register_hook(lambda _, seen=seen: seen.append(torch.is_autocast_enabled("cpu")))
        with_autocast, without = (gradients(layer, given, True, on) for on in (True, False))
        assert seen == [True, False]
        assert all(torch.equal(*pair) for pair in zip(with_autocast, without, strict=True))


def test_a_forward_that_fails_leaves_none(operands: tuple[torch.Tensor, ...]) -> None:
    group = group_of(1)
    held = column_parallel_linear(*operands[:2], None, group, backend="reference")
    with pytest.raises(UserError, match="k = 5") as error:  # its traceback keeps what the forward had made
        column_parallel_linear(operands[0], torch.ones(3, 5), None, group, backend="reference")
    assert prefetch.take(group) is None
    del held, error
