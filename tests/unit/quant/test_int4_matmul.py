"""torch's int4 kernels on the CPU against dequantised fp32, and what their layout cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.quant.gptq import pack, unpack
from megatron_flux.quant.int4_matmul import int4_linear
from tests.unit.quant.test_fold import linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_it_multiplies_as_dequantised(group: int, order: bool, bias: bool) -> None:
    made = linear(128, 48, order=order, bias=bias, group=group)
    ran = int4_linear(made)
    x = torch.randn(5, 128).to(torch.bfloat16)
    expected = torch.nn.functional.linear(x.float(), made.dequantize(), made.bias)
    assert (ran.order is None) is not order
    assert float((ran(x).float() - expected).norm() / expected.norm()) < 6e-3
    if order:
        assert torch.equal(ran(x[:, ran.order], ordered=True), ran(x))


def test_exactly_where_bf16_is_exact() -> None:
    made = linear(64, 16, group=32)
    scales = torch.full_like(made.scales, 0.5)
    x = torch.randint(-1, 2, (4, 64)).to(torch.bfloat16)
    exact = replace(made, scales=scales, qweight=pack(unpack(made.qweight, 4, 0).clamp(4, 8), 4, 0))
    exact = replace(exact, qzeros=pack(torch.full((2, 16), 5, dtype=torch.uint8), 4, 1))
    assert torch.equal(int4_linear(exact)(x).float(), x.float() @ exact.dequantize().t())


@pytest.mark.parametrize(("zero", "off"), [(None, lambda weight: 1 / 16), (8, lambda weight: weight.abs() / 256)])
def test_how_far_weights_are_from_gptqs(zero: int | None, off: Callable[[torch.Tensor], Any]) -> None:
    """In units of their scales, of all zero points or the symmetric one."""
    made = linear(512, 256, group=32)
    stored = torch.randint(0, 16, (16, 256)) if zero is None else torch.full((16, 256), zero - 1)
    made = replace(made, qzeros=pack(stored.to(torch.uint8), 4, 1))
    ran, groups = int4_linear(made), made.g_idx.long()
    scales, zeros = ran.scales_and_zeros.float().unbind(-1)
    exact = made.integers().float() - made.zeros()[groups]
    held = ((made.integers().float() - 8) * scales[groups] + zeros[groups]) / made.scales.float()[groups]
    assert bool(((held - exact).abs() <= off(exact) + 1e-6).all())
    assert float((held - exact).abs().max()) > (1 / 32 if zero is None else 1 / 64)


def test_what_torchs_layout_cannot_hold() -> None:
    with pytest.raises(UserError, match="linear cannot run as int4: groups of 16; can be 32, 64, 128, 256 rows"):
        int4_linear(linear(64, 16, group=16))
    with pytest.raises(UserError, match="n = 24; on cpu it must be a multiple of 16"):
        int4_linear(linear(64, 24, group=32))
    made = linear(64, 16, group=32)
    eight = replace(
        made, bits=8, qweight=torch.zeros(16, 16, dtype=torch.int32), qzeros=torch.zeros(2, 4, dtype=torch.int32)
    )
    with pytest.raises(UserError, match="8 bits; the matmul has 4"):
        int4_linear(eight)
    uneven = made.g_idx.clone()
    uneven[int((uneven == 1).nonzero()[0])] = 0
    with pytest.raises(UserError, match="groups of several sizes"):
        int4_linear(replace(made, g_idx=uneven))


def test_an_input_that_is_no_contiguous_matrix() -> None:
    made = int4_linear(linear(128, 48, order=False, group=32))
    wide = torch.randn(5, 256).to(torch.bfloat16)
    assert torch.equal(made(wide[:, ::2]), made(wide[:, ::2].contiguous()))
    assert torch.equal(made(wide.t()[:128].t()), made(wide[:, :128].contiguous()))


@pytest.mark.parametrize("order", [False, True])
def test_in_inference_mode_and_out_of_it(order: bool) -> None:
    """Wherever the weights and the input were made, without a gradient in any case."""
    made = linear(128, 48, order=order, bias=True, group=32)
    x = torch.randn(5, 128).to(torch.bfloat16)
    expected = int4_linear(made)(x)
    with torch.inference_mode():
        inside, own = int4_linear(made), x.clone()
        assert torch.equal(inside(own), expected)
    for ran in (inside, int4_linear(made)):
        for given in (x, own):
            y = ran(given)
            assert torch.equal(y, expected)
            assert not y.requires_grad
            y.add_(1)  # an all-reduce works in place
