"""The key of calls: every part that a plan depends on is in it, and every part that ranks must not differ in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.ops import call as calls
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from tests.unit.groups import group_of

F16 = torch.float16


def spec(operator: str = "all_gather_gemm", **changed: Any) -> Any:
    call = {"x": torch.zeros(4, 8), "weight": torch.zeros(6, 8), "group": group_of(2)}
    return OperatorCall(operator, **(call | changed)).key


OTHERS: list[dict[str, Any]] = [
    {"operator": "gemm_reduce_scatter"},
    {"wire": "int8"},
    {"transposed": True},
    {"return_gathered": False},
    {"async_op": True},
    {"x": torch.zeros(8, 8)},
    {"x": torch.zeros(2, 2, 8)},
    {"x": torch.zeros(4, 8, dtype=F16)},
    {"weight": None},
    {"weight": torch.zeros(8, 8)},
    {"weight": torch.zeros(6, 8, dtype=F16)},
    {"weight": torch.zeros(8, 6).t()},
    {"bias": torch.zeros(6)},
    {"bias": torch.zeros(5)},
    {"bias": torch.zeros(6, dtype=F16)},
    {"late_bias": torch.zeros(6)},
    {"late_bias": torch.zeros(6, dtype=F16)},
    {"own_gathered": True},
    {"addend": torch.zeros(4, 6)},
    {"addend": torch.zeros(2, 6)},
    {"addend": torch.zeros(4, 6, dtype=F16)},
    {"fp8": Fp8Pair(quantized(torch.ones(4, 8), "tensor"), quantized(torch.ones(6, 8), "tensor"))},
]


def test_another_call_has_another_spec() -> None:
    assert spec() == spec()
    assert hash(spec()) == hash(spec())
    seen = {spec(): "the first call"}
    for changed in OTHERS:
        other = spec(**changed)
        assert other not in seen, (changed, seen[other])
        seen[other] = str(changed)


def test_calls_for_graphs_have_specs_of_their_own() -> None:
    eager = spec()
    with captured_calls():
        assert spec() == (*eager[:-1], True)


def test_what_ranks_compare_leaves_out_what_each_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a rank with a frozen weight need no gathered x; shapes and dtypes must agree."""
    one = OperatorCall("all_gather_gemm", torch.zeros(4, 8), torch.zeros(6, 8), group_of(2))
    other = one._replace(return_gathered=False, bias=torch.zeros(6), x=torch.zeros(2, 2, 8))
    asked: list[str] = []
    monkeypatch.setattr(calls, "of_all_ranks", lambda mine, *_: asked.append(mine) or [mine])
    assert calls.compare_calls(one) == calls.compare_calls(other)
    assert asked == ["all_gather_gemm m=8 n=6 k=8 dtype=torch.float32 transposed=False"]
    assert calls.compare_calls(one._replace(x=torch.zeros(4, 8, dtype=F16))) != calls.compare_calls(one)
    assert len(asked) == 2


def test_a_call_that_has_a_name_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(words={}, spec=0)
    monkeypatch.setattr(calls.call_table, "create", lambda group: table)
    monkeypatch.setattr(calls.call_table, "MOST_WORDS", 2)
    monkeypatch.setattr(calls, "of_all_ranks", lambda mine, *_: [mine])
    one = OperatorCall("all_gather_gemm", torch.zeros(4, 8), torch.zeros(6, 8), group_of(2))
    other = one._replace(x=torch.zeros(4, 8, dtype=F16))
    numbers = [calls.compare_calls(call) for call in (one, other, one)]
    assert table.words.keys() == set(numbers)
    assert table.spec == numbers[0]
    calls.compare_calls(one._replace(x=torch.zeros(8, 8)))
    assert len(table.words) == 1, "one more: the older ones are forgotten"
