"""Plans by rule, and the candidates of the tuner: no GPU, no triton."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_flux.ops import fused
from megatron_flux.ops.backends.fused import hopper_kernels
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig, by_rule, candidates, fits, for_fp8, workers
from megatron_flux.ops.tuner import candidates as candidates_module
from megatron_flux.ops.tuner.cache import Entry
from tests.unit.groups import group_of

AG, RS = "all_gather_gemm", "gemm_reduce_scatter"


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize(("op", "n", "k"), [(AG, 14336, 8192), (RS, 8192, 7168)])
def test_plans_of_fp8_fit_a_gpu_and_are_made_once(op: str, n: int, k: int, promoted: bool) -> None:
    for mp, tp, ws in ((2048, 4, True), (1024, 8, True), (2048, 4, False)):
        found = candidates(op, mp, n, k, tp, 132, ws, promoted=promoted)
        assert found[0] == by_rule(op, mp, n, k, tp, 132, ws, promoted=promoted)
        assert len(set(found)) == len(found) >= 1
        for plan in found:
            assert plan.bk == 128
            assert for_fp8(plan, promoted=promoted) == plan, "a kept plan runs as it is"
            assert plan.bn == 128 or ws or not promoted
            if ws:
                assert plan.teams == 2 or not promoted
                used = plan.stages * (plan.bm + plan.bn) * plan.bk + plan.ring * plan.bm * 64 * 2
                used += plan.stages * (plan.bm + 32) * 4 if promoted else 0  # scales
                assert used <= 227 * 1024 - 16 * (plan.stages + plan.ring) - 64, plan.label()


@pytest.mark.parametrize(("split", "wanted"), [(None, 256), (False, 128), (True, 256)])
def test_only_fp8_gets_the_other_width_and_not_where_two_teams_share_a_tile(split: bool | None, wanted: int) -> None:
    m, n, k, fp8 = 3520, 512, 128, None
    x, weight = torch.zeros(m, k).bfloat16(), torch.zeros(n, k).bfloat16()
    if split is not None:
        fp8 = Fp8Pair(quantized(x.float(), "tensor"), quantized(weight.float(), "tensor"), split=split)
        x, weight = fp8.x.numbers, fp8.weight.numbers
    call = OperatorCall(RS, x, weight, group_of(2), fp8=fp8)
    plan = KernelConfig(ws=True, stages=3, ring=4, bk=64 if fp8 is None else 128, teams=2 if split else 1)
    with mock.patch.object(candidates_module, "sm_count", return_value=16):  # 56 tiles: 4 rounds, or 7 of half ones
        found = candidates_module.in_fewest_rounds(call, Entry(backend="fused", plan=plan))
    assert isinstance(found.plan, KernelConfig)
    assert found.plan.bn == wanted
    assert fits(RS, found.plan, m // 2, n, k, 2)


def test_sms_that_no_round_needs_add_partials() -> None:
    reserved, all_sms = KernelConfig(ws=True, dedicated_reducers=True), KernelConfig(ws=True)
    # 16 x 48 tiles of four ranks are 23.3 rounds of 132, and 24 of 128; 4 x 33 of one fill one round.
    assert workers(reserved, 2048, 12288, 4, 132) == 128
    assert workers(all_sms, 2048, 12288, 4, 132) == 132
    assert workers(reserved, 128, 33 * 256, 4, 132) == 132, "none is idle"
    assert workers(reserved, 128, 65 * 256, 4, 132) == 132, "two are too few to add what 130 multiply"
    assert workers(reserved, 128, 256, 4, 132) == 4

    def first(n: int, k: int, promoted: bool, mp: int = 2048) -> bool:
        return by_rule(RS, mp, n, k, 4, 132, True, promoted=promoted).dedicated_reducers

    assert first(8192, 7168, True)
    assert not first(8192, 3584, True)
    assert not first(8192, 7168, False)
    assert not first(33 * 256, 7168, True, mp=128)


# What a half's flags are enough for; ops/fused.py raises otherwise.

LARGE = [(131072, 16384, 8192), (262144, 16384, 1024), (1 << 20, 256, 64), (1 << 20, 16384, 64)]


@pytest.mark.parametrize("ws", [False, True])
@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
@pytest.mark.parametrize("op", [AG, RS])
def test_no_candidate_needs_more_flags_than_there_are(
    op: str, m: int, n: int, k: int, tp: int, ws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the plans themselves, which check before they claim a slot of the slab."""
    monkeypatch.setattr(fused, "sm_count", lambda _: 132)
    x = torch.empty((m // tp if op == AG else m, k), device="meta", dtype=torch.bfloat16)
    weight = torch.empty((n, k), device="meta", dtype=torch.bfloat16)
    found = candidates(op, m // tp, n, k, tp, 132, ws)
    made = fused.AllGatherGemmPlan if op == AG else fused.GemmReduceScatterPlan
    for plan in found:
        call = OperatorCall(op, x, weight, group_of(tp))
        made(call, plan).bytes_of_half(call)
    if op == RS and n == 16384:
        assert bool(found) == (m == 131072), "stock runs what is larger"


@pytest.mark.parametrize("mp", [256, 260, 130, 120])
@pytest.mark.parametrize("operator", [AG, RS])
def test_scales_of_a_shard_begin_where_tma_can_read(operator: str, mp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_flux.ops.backends.fused.capability", lambda of: (9, 0))
    monkeypatch.setattr("megatron_flux.ops.call.has_tma", lambda of: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rows = mp if operator == AG else 2 * mp
    numbers, weight = torch.randn(rows, 256), torch.randn(128, 256)
    for scaling, of_weight in (("tensor", "tensor"), ("1x128", "128x128")):
        pair = Fp8Pair(quantized(numbers, scaling), quantized(weight, of_weight))
        call = OperatorCall(operator, pair.x.numbers, pair.weight.numbers, group_of(2), fp8=pair)
        if operator == AG:
            # A tile may begin earlier, not before its shard.
            assert hopper_kernels(call) == (mp >= 128 and (scaling == "tensor" or mp % 4 == 0))
        else:
            assert hopper_kernels(call) == (scaling == "tensor" or mp % 4 == 0)
