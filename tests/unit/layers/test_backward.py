"""The weight gradient that nobody reads, beside ``main_grad``; and what Apex's kernel gets."""

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


@pytest.mark.parametrize("zero_out", [None, True, False])
def test_a_managed_weight_is_marked_and_gets_an_unread_gradient(
    monkeypatch: pytest.MonkeyPatch, zero_out: bool | None
) -> None:
    """``zero_out_wgrad`` really zeroes: uninitialised memory is NaN here. Of what is smaller, memory is shared."""
    monkeypatch.setattr(module, "_unread_memory", {})
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), float("nan"), **options))
    exact, addresses = EXACT[False], set()
    for n in (N, N - 1):
        dy, x = (integers(S, B, size, dtype=torch.bfloat16, high=4, seed=size) for size in (n, K))
        weight, main_grad = torch.nn.Parameter(torch.ones(n, K).bfloat16()), torch.zeros(n, K)
        weight.grad_added_to_main_grad = False
        if zero_out is not None:
            weight.zero_out_wgrad = zero_out
        group, how = group_of(1), Backends.of("auto")
        linear = LinearState(weight, main_grad, False, group, how, ALL_EXACT, None, True, exact)
        returned = exact.wgrad(linear, x, dy)
        assert weight.grad_added_to_main_grad is True
        assert torch.equal(main_grad.double(), dy.double().reshape(-1, n).t() @ x.double().reshape(-1, K))
        assert (returned.shape, returned.dtype) == (weight.shape, torch.bfloat16)
        assert (returned == 0).all() if zero_out else returned.isnan().all()
        addresses.add(returned.data_ptr())  # type: ignore[union-attr]
    assert zero_out or len(addresses) == 1


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
