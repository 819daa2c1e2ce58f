"""The fold against dequantised fp32, the paper's worked example, Megatron's layout, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.quant import megatron_layout
from megatron_flux.quant.fold import (
    MLP,
    NotFoldableError,
    fold,
    forward,
    is_folded,
    joined,
    part,
    shard,
    tensor_parallel_sizes,
    why_not,
)
from megatron_flux.quant.gptq import GPTQLinear, pack, round_to_nearest, unpack

HIDDEN, FFN, GROUP = 64, 128, 16


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).norm() / expected.norm()) < 1e-5


def linear(
    k: int, n: int, *, order: bool = True, bias: bool = False, seed: int = 0, name: str = "linear", group: int = GROUP
) -> GPTQLinear:
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=made)
    rows = torch.randperm(k, generator=made) if order else None
    return round_to_nearest(weight, group, rows, torch.randn(n, generator=made) if bias else None, name)


def mlp(*, gated: bool = True, bias: bool = False, hidden: int = HIDDEN, ffn: int = FFN) -> MLP:
    first = [linear(hidden, ffn, bias=bias, seed=1, name="gate")]
    if gated:
        up = linear(hidden, ffn, bias=bias, seed=2, name="up")
        order = first[0].order()
        weight = torch.randn(ffn, hidden, generator=torch.Generator().manual_seed(7))
        first.append(round_to_nearest(weight, GROUP, order, up.bias, "up"))
    return MLP(tuple(first), linear(ffn, hidden, bias=bias, seed=3, name="down"))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_come_back_out_of_what_they_were_packed_into(bits: int, dim: int) -> None:
    numbers = torch.randint(0, 1 << bits, (32, 64), dtype=torch.uint8)
    packed = pack(numbers, bits, dim)
    assert packed.dtype == torch.int32
    assert packed.shape[dim] == numbers.shape[dim] * bits // 32
    assert torch.equal(unpack(packed, bits, dim), numbers)


def test_packing_is_lowest_bits_first() -> None:
    numbers = torch.arange(8, dtype=torch.uint8)[:, None]
    assert pack(numbers, 4, 0).item() == 0x76543210
    assert pack(torch.tensor([[15] * 8], dtype=torch.uint8), 4, 1).item() == -1


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


def test_rounding_is_near() -> None:
    weight = torch.randn(32, 64)
    order = torch.randperm(64)
    made = round_to_nearest(weight, 16, order)
    assert made.group_size == 16
    assert torch.equal(made.order().reshape(4, 16).sort(1).values, order.reshape(4, 16).sort(1).values)
    step = made.scales.float()[made.g_idx.long()].t()
    assert ((made.dequantize() - weight).abs() <= 0.51 * step + 1e-3).all()


def test_the_worked_example() -> None:
    """Of the review of arXiv 2402.04925, on plain matrices."""
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    w1, w2 = torch.tensor([[1, 4], [2, 5], [3, 6]]), torch.tensor([[1, 2], [3, 4]])
    p1, p2 = torch.tensor([2, 0, 1]), torch.tensor([1, 0])
    y1 = x[:, p1] @ w1[p1][:, p2]
    assert y1.tolist() == [[32, 14], [77, 32]]
    assert (y1 @ w2[p2]).tolist() == [[110, 156], [263, 372]] == (x @ w1 @ w2).tolist()


def test_the_worked_example_by_the_fold() -> None:
    """The same orders, in blocks of eight rows and columns, which packing asks for."""
    eight = torch.arange(8)

    def spread(matrix: list[list[int]], order: list[int]) -> GPTQLinear:
        weight = torch.tensor(matrix, dtype=torch.uint8)
        k, n = weight.shape
        q = torch.zeros(8 * k, 8 * n, dtype=torch.uint8)
        q[::8, ::8] = weight
        groups = torch.empty(k, dtype=torch.int32)
        groups[torch.tensor(order)] = torch.arange(k, dtype=torch.int32)
        zeros = torch.zeros(k, 8 * n, dtype=torch.uint8)
        return GPTQLinear(pack(q, 4, 0), pack(zeros, 4, 1), torch.ones(k, 8 * n), groups.repeat_interleave(8),
                          zero_offset=0)  # fmt: skip

    first, second = spread([[1, 4], [2, 5], [3, 6]], [2, 0, 1]), spread([[1, 2], [3, 4]], [1, 0])
    x = torch.zeros(2, 24)
    x[:, ::8] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    made = fold(MLP((first,), second))
    order = made.first[0].order()
    assert order.reshape(3, 8).tolist() == [(eight + 8 * block).tolist() for block in (2, 0, 1)]
    y1 = x[:, order] @ made.first[0].with_rows(order).dequantize().t()
    assert y1[:, ::8].tolist() == [[32, 14], [77, 32]]
    assert (y1 @ made.second.dequantize().t())[:, ::8].tolist() == [[110, 156], [263, 372]]
    assert not made.second.has_activation_order()
    assert made.first[0].has_activation_order(), "its rows stay as they are"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_folded_is_the_same_function_on_every_tp_that_divides(gated: bool, bias: bool) -> None:
    before = mlp(gated=gated, bias=bias)
    after = fold(before)
    assert not is_folded(before)
    assert is_folded(after)
    assert fold(after) is after
    x = torch.randn(5, HIDDEN)
    expected = forward(before, x)
    assert near(forward(after, x), expected)
    assert tensor_parallel_sizes(before) == [1, 2, 4, 8]
    for tp in (1, 2, 4, 8):
        parts = [forward(shard(after, rank, tp), x) for rank in range(tp)]
        assert near(sum(parts), expected)


def test_one_group_is_every_rank_s() -> None:
    made = replace(mlp(), second=linear(FFN, HIDDEN, bias=True, seed=3, name="down", group=FFN))  # group_size -1
    x = torch.randn(5, HIDDEN)
    assert tensor_parallel_sizes(made) == [1, 2, 4, 8, 16]
    for tp in (1, 2, 4, 8, 16):
        assert near(sum(forward(shard(made, rank, tp), x) for rank in range(tp)), forward(made, x))


@pytest.mark.parametrize("already", [False, True])
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_a_rank_s_part_is_that_of_the_folded_whole_to_the_bit(gated: bool, bias: bool, already: bool) -> None:
    whole = mlp(gated=gated, bias=bias)
    whole = fold(whole) if already else whole
    for tp in (1, 2, 8):
        for rank in range(tp):
            found, expected = part(whole, rank, tp), shard(fold(whole, tp), rank, tp)
            for ours, theirs in zip((*found.first, found.second), (*expected.first, expected.second), strict=True):
                assert ours.name == theirs.name
                for name in ("qweight", "qzeros", "scales", "g_idx", "bias"):
                    one, other = getattr(ours, name), getattr(theirs, name)
                    assert one is other is None or (torch.equal(one, other) and one.is_contiguous()), (tp, rank, name)


def test_a_part_is_refused_as_the_fold_is() -> None:
    made = mlp()
    with pytest.raises(NotFoldableError, match="groups of down straddle ranks"):
        part(made, 0, 16)
    with pytest.raises(NotFoldableError, match="gate and up have different activation orders"):
        part(MLP((made.first[0], linear(HIDDEN, FFN, seed=9, name="up")), made.second), 0, 2)


def test_only_linears_of_one_kind_are_joined() -> None:
    made = mlp()
    with pytest.raises(NotFoldableError, match="gate and up have different activation orders, but one input"):
        joined([made.first[0], linear(HIDDEN, FFN, seed=9, name="up")])
    with pytest.raises(UserError, match=r"gate and up are of different formats \(4 bits, zero_offset 1, 4 bits"):
        joined([made.first[0], replace(made.first[1], zero_offset=0)])


MEMORY = """
import resource, sys, torch
from megatron_flux.quant.fold import MLP, fold, joined, part
from megatron_flux.quant.gptq import GPTQLinear
from megatron_flux.quant.int4_matmul import int4_linear

def linear(k, n, like=None):
    order = torch.empty(k, dtype=torch.int32)
    order[torch.randperm(k)] = torch.arange(k, dtype=torch.int32) // 128
    whole = lambda *shape: torch.randint(-2**31, 2**31 - 1, shape, dtype=torch.int32)
    order = order if like is None else like
    return GPTQLinear(whole(k // 8, n), whole(k // 128, n // 8), torch.rand(k // 128, n).half(), order)

gate = linear(2048, 8192)
mlp = MLP((gate, linear(2048, 8192, gate.g_idx)), linear(8192, 2048))
packed = sum(one.qweight.nbytes for one in (*mlp.first, mlp.second))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "fold":
    fold(mlp)
else:
    own = part(mlp, 0, 2)
    kept = int4_linear(joined(own.first)), int4_linear(own.second)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / packed)
"""


@pytest.mark.parametrize(("what", "most"), [("fold", 5), ("load", 8)])
def test_memory_of_one_mlp(what: str, most: int) -> None:
    """In multiples of its packed weights, of which unpacked ones take two: the fold, and a rank's part made to run (on
    CPUs torch's layout is made of int32, eight times as large).
    """
    words = [sys.executable, "-c", MEMORY, what]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < most


def test_a_shard_of_what_is_not_folded_is_refused() -> None:
    with pytest.raises(NotFoldableError, match="down has activation order; fold the MLP"):
        shard(mlp(), 0, 2)


def test_unequal_orders_of_gate_and_up_are_refused() -> None:
    made = mlp()
    other = linear(HIDDEN, FFN, seed=9, name="up")
    with pytest.raises(NotFoldableError, match=r"gate and up have different activation orders \(\d+ of 64 rows"):
        fold(MLP((made.first[0], other), made.second))


def test_groups_that_straddle_ranks_are_refused() -> None:
    made = mlp()
    said = r"groups of down straddle ranks.*tp 16 are 8 a rank.*of 16; tp can be 1, 2, 4, 8"
    with pytest.raises(NotFoldableError, match=said):
        fold(made, 16)
    with pytest.raises(NotFoldableError, match=r"tp 3 are 42\.6667 a rank"):
        fold(made, 3)


def test_an_ungrouped_order_is_refused() -> None:
    made = mlp()
    g_idx = made.second.g_idx.clone()
    g_idx[int((g_idx == 3).nonzero()[0])] = 2
    with pytest.raises(NotFoldableError, match="down has an ungrouped order: its groups differ in size"):
        fold(MLP(made.first, replace(made.second, g_idx=g_idx)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 3}, "3 bits; can be one of 2, 4, 8"),
        ({"zero_offset": 2}, "zero_offset 2; 1 is format gptq"),
        ({"scales": torch.ones(4, 8)}, r"scales is \[4, 8\], must be \[4, 128\]"),
        ({"scales": torch.ones(4, 128, dtype=torch.int32)}, "scales are torch.int32"),
        ({"g_idx": torch.zeros(4, dtype=torch.int32)}, r"g_idx is \[4\], must be \[64\]"),
        ({"g_idx": torch.full((64,), 4, dtype=torch.int32)}, "g_idx runs from 4 to 4, must be within 0 and 3"),
        ({"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "g_idx runs from -1 to -1"),
        ({"qweight": torch.zeros(8, 128)}, "qweight is torch.float32, must be torch.int32"),
        ({"bias": torch.zeros(3)}, r"bias is \[3\], must be \[128\]"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(change: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(linear(HIDDEN, FFN), **change)


def test_linears_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="linear is 64 to 128; beside linear, of 64 inputs, and linear, of 64"):
        MLP((linear(HIDDEN, FFN),), linear(HIDDEN, FFN))


def row_parts(linear: GPTQLinear, tp: int) -> list[GPTQLinear]:
    """A row-parallel linear shared out before any fold: ranks' rows may be in any group, so all have all scales."""
    numbers = unpack(linear.qweight, linear.bits, 0).chunk(tp)
    return [
        replace(
            linear,
            qweight=pack(part, linear.bits, 0),
            g_idx=g_idx.contiguous(),
            bias=linear.bias if rank == 0 else None,
        )
        for rank, (part, g_idx) in enumerate(zip(numbers, linear.g_idx.chunk(tp), strict=True))
    ]


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_megatrons_ranks_are_folded_together(gated: bool) -> None:
    whole, tp = mlp(gated=gated, bias=True), 4
    seconds = row_parts(whole.second, tp)
    parts = []
    for rank in range(tp):
        own = torch.arange(rank * FFN // tp, (rank + 1) * FFN // tp)
        parts.append((joined([part.with_columns(own) for part in whole.first]), seconds[rank]))
    put_together = megatron_layout.gathered(parts, gated)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(forward(put_together, x), forward(whole, x))
    total = torch.zeros(3, HIDDEN)
    for first, second in megatron_layout.folded(parts, gated):
        halves = [first.with_columns(half) for half in torch.arange(first.n).chunk(2 if gated else 1)]
        total += forward(MLP(tuple(halves), second), x)
    assert near(total, forward(whole, x))


def test_groups_of_their_own_with_equal_scales_are_no_shared_ones() -> None:
    """Only their zero points tell them apart."""
    whole = mlp(gated=False)
    whole = MLP(whole.first, replace(fold(whole).second, scales=torch.full_like(whole.second.scales, 0.5)))
    parts = [shard(whole, rank, 2) for rank in range(2)]
    put_together = megatron_layout.gathered([(mine.first[0], mine.second) for mine in parts], gated=False)
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(forward(put_together, x), forward(whole, x))


def test_parts_with_other_orders_are_refused() -> None:
    first, second = linear(HIDDEN, FFN), linear(FFN // 2, HIDDEN)
    other = linear(HIDDEN, FFN, seed=5)
    with pytest.raises(UserError, match="FC1 has another activation order on some ranks"):
        megatron_layout.gathered([(first, second), (other, second)], gated=False)


def test_what_is_said_of_an_mlp_that_can_be_folded() -> None:
    assert why_not(mlp()) is None
    assert why_not(mlp(), 4) is None
