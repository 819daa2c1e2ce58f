"""The weight gradient: plain, and accumulated into ``main_grad`` by Megatron's rules."""

from types import SimpleNamespace

import pytest
import torch

from megatron_flux.config import ALL_EXACT, Backends
from megatron_flux.layers import backward as module
from megatron_flux.layers.backward import accumulate
from megatron_flux.layers.precision import EXACT, LinearState
from tests.distributed.data import integers
from tests.unit.groups import group_of
from tests.unit.ops.fakes import OnGpu

S, B, N, K = 16, 2, 3, 5


def operands(dtype: torch.dtype, high: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return integers(S, B, N, dtype=dtype, high=high, seed=1), integers(S, B, K, dtype=dtype, high=high, seed=2)


def exact(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy.double().reshape(-1, N).t() @ x.double().reshape(-1, K)


def weight_of(dtype: torch.dtype, **attributes: object) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(N, K, dtype=dtype))
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def weight_gradient(
    weight: torch.Tensor, main_grad: torch.Tensor | None, dy: torch.Tensor, x: torch.Tensor, overwrite: bool = False
) -> torch.Tensor | None:
    exact = EXACT[False]
    linear = LinearState(weight, main_grad, overwrite, group_of(1), Backends.of("auto"), ALL_EXACT, None, True, exact)
    return exact.wgrad(linear, x, dy)


def test_a_managed_weight_is_marked_and_gets_an_unread_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """``zero_out_wgrad`` really zeroes: uninitialised memory is NaN here."""
    monkeypatch.setattr(module, "_unread_memory", {})
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), float("nan"), **options))
    dy, x = operands(torch.bfloat16)
    for zero_out in (None, True, False, True):
        weight, main_grad = weight_of(torch.bfloat16, grad_added_to_main_grad=False), torch.zeros(N, K)
        if zero_out is not None:
            weight.zero_out_wgrad = zero_out
        returned = weight_gradient(weight, main_grad, dy, x)
        assert weight.grad_added_to_main_grad is True
        assert torch.equal(main_grad.double(), exact(dy, x))
        assert (returned.shape, returned.dtype) == (weight.shape, torch.bfloat16)
        assert (returned == 0).all() if zero_out else returned.isnan().all()


def test_unread_gradients_share_the_memory_of_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_unread_memory", {})

    def unread(n: int, k: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(n, k, dtype=dtype))
        weight.grad_added_to_main_grad = False
        dy, x = torch.ones(2, n, dtype=dtype), torch.ones(2, k, dtype=dtype)
        found = weight_gradient(weight, torch.zeros(n, k), dy, x)
        assert found.shape == weight.shape
        assert found.is_contiguous()
        return found

    large, small = unread(6, 5), unread(3, 4)
    assert small.data_ptr() == large.data_ptr() == unread(6, 5).data_ptr()
    assert unread(7, 5).data_ptr() != large.data_ptr()
    assert unread(3, 4, torch.bfloat16).dtype == torch.bfloat16


def test_apex_gets_rows_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes addresses and sizes for all there is: of a slice, or of one row many times, it would read on."""
    given: list[torch.Tensor] = []

    def accum(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        given.extend((x, dy))

    monkeypatch.setattr(module, "apex_kernel", lambda: SimpleNamespace(wgrad_gemm_accum_fp32=accum))
    wide, row = torch.randn(S, B, 2 * K).bfloat16(), torch.randn(N).bfloat16()
    x, dy = wide[..., :K], row.expand(S, B, N)
    accumulate(torch.zeros(N, K), dy.as_subclass(OnGpu), x.as_subclass(OnGpu))
    assert [t.is_contiguous() for t in given] == [True, True]
    assert torch.equal(given[0], x.reshape(-1, K))
    assert torch.equal(given[1], dy.reshape(-1, N))
