"""What follows from m is all that differs between the launches of two m."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import KernelConfig, for_fp8
from tests.unit.groups import group_of

pytest.importorskip("triton", minversion="3.6")

from megatron_flux.ops import hopper_arguments
from megatron_flux.ops.arguments import SlabCall

N, K = 512, 256
WORDS, FLAGS = torch.zeros(64, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
WORK: Any = SimpleNamespace(
    tp=2, rank=1, half_bytes=2 << 20, data=[torch.zeros(4 << 20, dtype=torch.uint8) for _ in range(2)],
    data_table=FLAGS, flag_table=FLAGS, flags=[WORDS] * 2, sums=FLAGS,
    arguments=lambda half: (WORDS, WORDS, WORDS, 10**9, half, 1 - half, 64 * half),
)  # fmt: skip
WEIGHT = torch.randn(N, K).bfloat16()


def slab_call(operator: str, m: int, scaling: str, fixed: dict[str, Any]) -> Any:
    """A call as on an H100, on CPU tensors."""
    rows = m // 2 if operator == "all_gather_gemm" else m
    x, weight, fp8 = torch.randn(rows, K).bfloat16(), WEIGHT, None
    config = KernelConfig(ws=True, dedicated_reducers=True)  # as many SMs multiply as m asks for
    if scaling != "none":
        of_weight: Any = "128x128" if scaling == "1x128" else "tensor"
        fp8 = Fp8Pair(quantized(x.float(), scaling), fixed.setdefault("w", quantized(WEIGHT.float(), of_weight)))  # type: ignore[arg-type]
        x, weight, config = fp8.x.numbers, fp8.weight.numbers, for_fp8(config, promoted=fp8.promoted)
    call: Any = OperatorCall(operator, x, weight, group_of(2), fp8=fp8)
    out = torch.empty(m if operator != "gemm_reduce_scatter" else m // 2, N, dtype=torch.bfloat16)
    gathered = scales = None
    if operator == "all_gather_gemm":
        gathered = WORK.data[1][: m * K * x.element_size()].view(x.dtype).view(m, K)
        if scaling == "1x128":
            scales = torch.zeros(2, *fp8.x.scale_inv.shape)  # type: ignore[union-attr]
    return SlabCall(call, out, WORK, 0, config, 132, fixed, gathered=gathered, scales=scales)


def seen(argument: Any) -> Any:
    """Return what a kernel is given, but for addresses."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return argument if isinstance(argument, int | None) else (argument.base.dtype, *map(tuple, argument[1:4]))


@pytest.mark.parametrize("scaling", ["none", "tensor", "1x128"])
@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_only_what_follows_from_m_differs(operator: str, scaling: str) -> None:
    build = hopper_arguments.all_gather_gemm if operator == "all_gather_gemm" else hopper_arguments.gemm_reduce_scatter
    fixed: dict[str, Any] = {}
    one, other = (build(slab_call(operator, m, scaling, fixed)) for m in (512, 1064))
    assert (one.kernel, one.grid, one.constants, one.operands) == (
        other.kernel, other.grid, other.constants, other.operands
    )  # fmt: skip
    names = one.kernel.arg_names
    differs = {
        name
        for name, a, b in zip(names, one.arguments, other.arguments, strict=False)
        if seen(a) != seen(b)
    }  # fmt: skip
    expected = {"a", "mp"} if operator == "all_gather_gemm" else {"a", "mp", "workers"}
    assert expected <= differs <= set(one.rows)
    assert one.rows.keys() == other.rows.keys()
    for name, argument in other.rows.items():
        assert seen(argument) == seen(other.arguments[names.index(name)])


@pytest.mark.parametrize(
    ("operator", "m", "change", "parts"),
    [
        ("all_gather_gemm", 512, {}, 2),
        ("all_gather_gemm", 520, {}, 1),  # two tiles have some rows, and must have the same bits
        ("gemm_reduce_scatter", 520, {}, 2),
        ("gemm_all_reduce", 512, {}, 2),
        ("gemm_all_reduce", 512, {"beside": True}, 2),
        ("gemm_reduce_scatter", 512, {"config": KernelConfig(ws=True, bn=256, bm=256)}, 1),  # more than `sums` has room
        ("gemm_reduce_scatter", 512, {"config": KernelConfig(ws=True, teams=2)}, 1),
    ],
)
def test_which_last_rounds_are_divided(
    operator: str, m: int, change: dict[str, Any], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = 256 * 27 if m > 512 else 256 * 34, 1024  # one round and a bit
    monkeypatch.setattr(f"{__name__}.N", n)
    monkeypatch.setattr(f"{__name__}.K", k)
    monkeypatch.setattr(f"{__name__}.WEIGHT", torch.zeros(n, k).bfloat16())
    at = slab_call(operator, m, "none", {})
    at.config = KernelConfig(ws=True)
    for name, value in change.items():
        setattr(at, name, value)
    build = hopper_arguments.all_gather_gemm if operator == "all_gather_gemm" else hopper_arguments.gemm_reduce_scatter
    launch = build(at)
    assert launch.rows["parts"] == parts
    assert launch.constants["SPLIT_K"] is not (parts == 1 and m == 512)
    assert (launch.rows["left"] > 0) == (parts > 1)


def test_products_with_an_addend_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    at = slab_call("gemm_reduce_scatter", 512, "none", {})
    at.call = OperatorCall("gemm_reduce_scatter", at.call.x, WEIGHT, group_of(2), addend=torch.zeros(512, N).bfloat16())
    assert hopper_arguments.gemm_reduce_scatter(at).constants["SPLIT_K"] is False


@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_an_undivided_plan_is_compiled_alike_whatever_others_have_made(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kernel that was compiled ahead is compiled again, in a step."""
    build = hopper_arguments.all_gather_gemm if operator == "all_gather_gemm" else hopper_arguments.gemm_reduce_scatter
    at = slab_call(operator, 512, "tensor", {})
    found = []
    for sums in (None, torch.zeros(1)):
        monkeypatch.setattr(WORK, "sums", sums)
        found.append([seen(argument) for argument in build(at).arguments])
    assert found[0] == found[1]
