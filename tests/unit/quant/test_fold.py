"""The fold against dequantised fp32, and numbers by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.quant.fold import fold, forward, shard, tensor_parallel_sizes, why_not
from megatron_flux.quant.gptq import GPTQLinear, pack
from tests.unit.quant.linears import HIDDEN, mlp, near


@pytest.mark.parametrize("offset", [0, 1])
def test_dequantised_by_hand(offset: int) -> None:
    q = torch.tensor([[3, 1], [7, 15], [0, 4], [9, 2]] * 4, dtype=torch.uint8).repeat(1, 4)
    g_idx = torch.tensor([0, 1, 1, 0] * 4, dtype=torch.int32)
    stored = torch.tensor([[2] * 8, [5] * 8], dtype=torch.uint8)
    scales = torch.tensor([[0.5] * 8, [2.0] * 8])
    made = GPTQLinear(pack(q, 4, 0), pack(stored, 4, 1), scales, g_idx, zero_offset=offset)
    weight = made.dequantize()
    assert weight.shape == (8, 16)
    assert weight[0, 0] == (3 - 2 - offset) * 0.5
    assert weight[1, 1] == (15 - 5 - offset) * 2.0
    assert weight[0, 3] == (9 - 2 - offset) * 0.5
    assert made.order().tolist() == sorted(range(16), key=lambda row: int(g_idx[row]))


@pytest.mark.parametrize(("gated", "bias", "bits"), [(True, False, 2), (False, True, 4), (True, True, 8)])
def test_folded_is_the_same_function_on_every_tp_that_divides(gated: bool, bias: bool, bits: int) -> None:
    before = mlp(gated=gated, bias=bias, bits=bits)
    after = fold(before)
    assert fold(after) is after
    assert before.second.has_activation_order()
    assert not after.second.has_activation_order()
    x = torch.randn(5, HIDDEN)
    expected = forward(before, x)
    assert near(forward(after, x), expected)
    assert tensor_parallel_sizes(before) == [1, 2, 4, 8]
    for tp in (1, 2, 4, 8):
        assert why_not(before, tp) is None
        assert near(sum(forward(shard(after, rank, tp), x) for rank in range(tp)), expected)


def test_mlps_that_cannot_be_folded() -> None:
    made = mlp()
    with pytest.raises(UserError, match=r"of down straddle.*tp 16 are 8 a rank.*of 16; tp can be 1, 2, 4, 8"):
        fold(made, 16)
    with pytest.raises(UserError, match=r"tp 3 are 42\.6667 a rank"):
        fold(made, 3)
    with pytest.raises(UserError, match="has activation order; fold the MLP"):
        shard(made, 0, 2)
    with pytest.raises(UserError, match="tp can be 1, 2, 4, 8"):
        shard(fold(made), 0, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(4, 8)}, r"scales is \[4, 8\], must be \[4, 128\]"),
        ({"g_idx": torch.zeros(4, dtype=torch.int32)}, r"g_idx is \[4\], must be \[64\]"),
        ({"g_idx": torch.full((64,), 4, dtype=torch.int32)}, "g_idx runs from 4 to 4, must be within 0 and 3"),
        ({"qweight": torch.zeros(8, 128)}, "qweight is torch.float32, must be torch.int32"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(mlp().first[0], **change)
