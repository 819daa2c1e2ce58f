"""Wrong operands are refused before any communication, and the message says what was given, allowed and to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_flux import UserError, ops
from megatron_flux.ops.fp8_operand import quantized
from tests.unit.groups import group_of

ROWS, K, N = 4, 6, 5
OPERATORS = {"all_gather_gemm": ops.all_gather_gemm, "gemm_reduce_scatter": ops.gemm_reduce_scatter}


def operands(transposed: bool = False, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (K, N) if transposed else (N, K)
    return torch.ones(ROWS, K, dtype=dtype), torch.ones(shape, dtype=dtype)


@pytest.fixture(params=list(OPERATORS))
def operator(request: pytest.FixtureRequest) -> str:
    return request.param


def refused(operator: str, *args: Any, **kwargs: Any) -> str:
    before = ops.stats.total(operator)
    with pytest.raises(UserError) as error:
        OPERATORS[operator](*args, **kwargs)
    assert ops.stats.total(operator) == before
    message = str(error.value)
    assert "\n" not in message
    return message


def test_an_own_gathered_input_that_nothing_gives() -> None:
    """In FP8 the kernel would write to x."""
    x, weight = operands()
    asked = {"own_gathered": True, "backend": "reference"}
    assert "got return_gathered=False and torch.float32" in refused("all_gather_gemm", x, weight, group_of(2), **asked)
    fp8 = [quantized(torch.ones(rows, 16), "tensor") for rows in (16, 16)]
    said = refused("all_gather_gemm", *fp8, group_of(2), return_gathered=True, **asked)
    assert "own_gathered needs return_gathered, and no FP8, got return_gathered=True and FP8 operands" in said


@pytest.mark.parametrize("transposed", [False, True])
def test_inner_dimensions_that_differ(operator: str, transposed: bool) -> None:
    x, weight = operands(transposed)
    message = refused(operator, x, weight.t(), group_of(2), transposed=transposed)
    assert message.startswith(operator)
    assert str(tuple(x.shape)) in message
    assert str(tuple(weight.t().shape)) in message
    assert f"k = {N}" in message
    assert f"is transposed={transposed} meant?" in message


@pytest.mark.parametrize("shapes", [((K,), (N, K)), ((ROWS, K), (K,)), ((ROWS, K), (1, N, K)), ((), (N, K))])
def test_too_few_or_many_dimensions(operator: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    message = refused(operator, torch.ones(shapes[0]), torch.ones(shapes[1]), group_of(2))
    assert message.startswith(operator)
    assert "at least 2 dimensions" in message
    assert all(str(shape) in message for shape in shapes)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.int64, torch.int64),
    ],
)
def test_dtypes(operator: str, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = operands()
    message = refused(operator, x.to(x_dtype), weight.to(weight_dtype), group_of(2))
    assert f"got {x_dtype} and {weight_dtype}" in message
    assert all(name in message for name in ("torch.float32", "torch.bfloat16", "torch.float16"))


def test_devices(operator: str) -> None:
    x, weight = operands()
    message = refused(operator, x, weight.to("meta"), group_of(2))
    assert "x is on cpu and weight on meta; move them to one device" in message


@pytest.mark.parametrize("bias", [torch.ones(N + 1), torch.ones(1, N), torch.ones(N, dtype=torch.bfloat16)])
def test_bias(operator: str, bias: torch.Tensor) -> None:
    x, weight = operands()
    message = refused(operator, x, weight, group_of(2), bias=bias)
    assert f"bias must be [{N}] torch.float32 on cpu" in message
    assert f"got {list(bias.shape)} {bias.dtype}" in message


def test_rows_that_do_not_divide() -> None:
    x, weight = operands()
    message = refused("gemm_reduce_scatter", x[:3], weight, group_of(2))
    assert f"{(3, K)}" in message
    assert "divisible by the group size 2" in message
    assert "pad" in message


def test_the_first_dimension_counts_not_the_rows() -> None:
    x, weight = torch.ones(3, 2, K), torch.ones(N, K)
    message = refused("gemm_reduce_scatter", x, weight, group_of(2))
    assert f"first dimension of x {(3, 2, K)}" in message


def test_bias_with_async() -> None:
    x, weight = operands()
    message = refused("gemm_reduce_scatter", x, weight, group_of(2), bias=torch.ones(N), async_op=True)
    assert "add it after wait()" in message


def test_unknown_backend(operator: str) -> None:
    x, weight = operands()
    message = refused(operator, x, weight, group_of(2), backend="nccl")
    assert message == f"unknown backend 'nccl'; use one of: {', '.join(ops.backend_names())}"
    assert "reference" in message


def test_no_process_group(operator: str) -> None:
    x, weight = operands()
    message = refused(operator, x, weight)
    assert "init_process_group" in message
    assert "group=" in message


def test_all_gather_refuses_what_it_cannot_send() -> None:
    with pytest.raises(UserError, match=r"all_gather: x must .* got \(4, 6\) torch.float64"):
        ops.all_gather(torch.ones(4, 6, dtype=torch.float64), group_of(2))
    with pytest.raises(UserError, match=r"all_gather: x must .* got \(6,\) torch.float32"):
        ops.all_gather(torch.ones(6), group_of(2))
    with pytest.raises(UserError, match="unknown backend 'nccl'"):
        ops.all_gather(torch.ones(4, 6), group_of(2), backend="nccl")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_group_of_one_is_the_gemm_alone(transposed: bool) -> None:
    torch.manual_seed(1)
    x, bias = torch.randn(3, 2, K), torch.randn(N)
    weight = torch.randn((K, N) if transposed else (N, K))
    expected = x @ (weight if transposed else weight.t()) + bias
    y, gathered = ops.all_gather_gemm(x, weight, group_of(1), bias=bias, transposed=transposed, return_gathered=True)
    torch.testing.assert_close(y, expected)
    assert torch.equal(gathered, x)
    y = ops.gemm_reduce_scatter(x, weight, group_of(1), bias=bias, transposed=transposed)
    torch.testing.assert_close(y, expected)
    pending = ops.gemm_reduce_scatter(x, weight, group_of(1), transposed=transposed, async_op=True)
    torch.testing.assert_close(pending.wait(), expected - bias)
    assert torch.equal(ops.all_gather(x, group_of(1)).wait(), x)


def test_results_do_not_require_a_gradient() -> None:
    x, weight = torch.ones(2, K, requires_grad=True), torch.ones(N, K, requires_grad=True)
    y = ops.all_gather_gemm(x, weight, group_of(1))
    assert not y.requires_grad
    assert not ops.gemm_reduce_scatter(x, weight, group_of(1)).requires_grad
    assert not ops.gemm_reduce_scatter(x, weight, group_of(1), async_op=True).wait().requires_grad
