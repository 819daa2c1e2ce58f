"""The column-parallel layer that a row-parallel one prefetches for."""

import pytest
import torch

from megatron_flux import UserError
from megatron_flux.layers import column_parallel_linear, prefetch
from tests.unit.groups import group_of


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 1, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)


def test_the_newest_one_of_the_group_is_taken_once(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    group = group_of(1)
    held = [column_parallel_linear(*operands, None, group, backend="reference") for _ in range(2)]
    found = prefetch.take(group)
    assert found is held[1].grad_fn.linear
    assert prefetch.take(group) is None


def test_without_gather_ahead_there_is_none(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    group = group_of(1)
    held = [
        column_parallel_linear(*operands, None, group, backend="reference", gather_ahead=on) for on in (True, False)
    ]
    assert prefetch.take(group) is None
    del held


def test_a_forward_that_fails_leaves_none(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    group = group_of(1)
    held = column_parallel_linear(*operands, None, group, backend="reference")
    with pytest.raises(UserError, match="k = 5") as error:  # its traceback keeps what the forward had made
        column_parallel_linear(operands[0], torch.ones(3, 5), None, group, backend="reference")
    assert prefetch.take(group) is None
    del held, error
