"""The choice of a plan, the shapes of the benchmark, and the tuning cache: no GPU, no triton."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.bench.cases import Case
from megatron_flux.bench.options import OpsRun
from megatron_flux.errors import UserError
from megatron_flux.ops import all_reduce_config, launch, shipped_plans
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.backends import tuning_cache
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fp8_operand import Fp8Pair, quantized
from megatron_flux.ops.kernel_config import (
    KernelConfig,
    ag_config,
    candidates,
    for_fp8,
    fp8_candidates,
    fp8_config,
    rs_config,
    workers,
)
from tests.unit.groups import group_of


def test_candidates_begin_with_the_plan_without_a_tuner() -> None:
    assert candidates("all_gather_gemm", 1024, 6144, 12288, 8, 132)[0] == ag_config(1024, 6144, 12288, 8, 132)
    assert candidates("gemm_reduce_scatter", 1024, 12288, 6144, 8, 132)[0] == rs_config(1024, 12288, 6144, 8, 132)


@pytest.mark.parametrize("promoted", [False, True])
@pytest.mark.parametrize(("op", "n", "k"), [("all_gather_gemm", 14336, 8192), ("gemm_reduce_scatter", 8192, 7168)])
def test_plans_of_fp8_fit_a_gpu_and_are_made_once(op: str, n: int, k: int, promoted: bool) -> None:
    for mp, tp, ws in ((2048, 4, True), (1024, 8, True), (2048, 4, False)):
        found = fp8_candidates(op, mp, n, k, tp, 132, ws, promoted=promoted)
        assert found[0] == fp8_config(op, mp, n, k, tp, 132, ws, promoted=promoted)
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


def test_partials_of_fp8_take_the_link_twice_as_much() -> None:
    """The GEMM is twice as fast, what it sends is the same."""
    assert rs_config(1024, 12288, 3072, 8, 132, True).spread == 75
    assert fp8_config("gemm_reduce_scatter", 1024, 12288, 3072, 8, 132, True, promoted=False).spread == 0


def test_answers_of_fp8_are_kept_by_all_that_they_depend_on() -> None:
    numbers = torch.randn(256, 256)
    by_tensor = Fp8Pair(quantized(numbers, "tensor"), quantized(numbers, "tensor"))
    pairs = [
        by_tensor,
        by_tensor._replace(split=True),
        by_tensor._replace(out=torch.float32),
        by_tensor._replace(x=quantized(numbers, "tensor", torch.float8_e5m2)),
        Fp8Pair(quantized(numbers, "1x128"), quantized(numbers, "128x128")),
    ]
    operands = ("all_gather_gemm", 256, 256, 256)
    keys = {tuning_cache.describe(*operands, p.x.numbers, False, 2, "nvlink", fp8=p.kind) for p in pairs}
    assert len(keys) == len({p.kind for p in pairs}) == len(pairs)
    assert any(" e4m3fn x e4m3fn by tensor, split, to bfloat16 " in key for key in keys)


def test_label_names_what_differs() -> None:
    assert KernelConfig().label() == "default"
    assert KernelConfig(ws=True, bn=128).label() == "bn=128 ws=True"


def cases_of(preset: str, tokens: str, **more: str) -> list[Case]:
    return OpsRun(tp=8, preset=preset, tokens=tokens, **more).cases()


def test_shapes_of_gpt3() -> None:
    cases = cases_of("gpt3-175b", "8192")
    found = {(c.layer, c.direction): (c.op, c.n, c.k) for c in cases}
    assert found["fc1", "forward"] == ("all_gather_gemm", 6144, 12288)
    assert found["fc2", "forward"] == ("gemm_reduce_scatter", 12288, 6144)
    assert found["qkv", "forward"] == ("all_gather_gemm", 4608, 12288)
    assert found["fc1", "dgrad"] == ("gemm_reduce_scatter", 12288, 6144)
    assert found["fc2", "dgrad"] == ("all_gather_gemm", 6144, 12288)
    assert all(c.bytes_received(8) == 7 * 1024 * 12288 * 2 for c in cases)


def test_shapes_of_llama_70b() -> None:
    found = {c.layer: (c.n, c.k) for c in cases_of("llama2-70b", "2048", directions="forward")}
    assert found == {"qkv": (1280, 8192), "proj": (8192, 1024), "fc1": (7168, 8192), "fc2": (8192, 3584)}


def test_cache_is_merged_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuned.json"
    tuning_cache.store(path, "a", {"backend": "reference", "plan": None, "ms": {}})
    tuning_cache.store(path, "b", {"backend": "fused", "plan": {"bm": 128}, "ms": {"reference": 2.0}})
    assert set(tuning_cache.load(path)) == {"a", "b"}
    assert len(path.read_text().splitlines()) > 5
    assert {p.name for p in path.parent.iterdir()} == {"tuned.json", ".tuned.json.lock"}


def test_broken_cache_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("{")
    with pytest.raises(UserError, match="delete it"):
        tuning_cache.load(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(UserError, match="delete it"):
        tuning_cache.load(path)
    path.write_text('{"a":' + "[" * 100_000)
    with pytest.raises(UserError, match="delete it"):
        tuning_cache.load(path)


def test_other_users_may_read_what_was_tuned(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        tuning_cache.store(tmp_path / "tuned.json", "a", {"backend": "reference", "plan": None, "ms": {}})
    finally:
        os.umask(before)
    assert (tmp_path / "tuned.json").stat().st_mode & 0o777 == 0o640


FUSED = {"backend": "fused", "plan": asdict(KernelConfig()), "ms": {"reference": 1.0}}
REDUCED = {**FUSED, "plan": asdict(AllReduceConfig())}
CHUNKED = {"backend": "chunked_fp8", "plan": None, "pieces": 2, "ms": {}}


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        *(("all_gather_gemm m=8 host wire=int8 |", CHUNKED), ("all_gather_gemm m=8 host |", CHUNKED)),
        *(("gemm_all_reduce m=8 nvlink |", FUSED), ("all_gather_gemm m=8 nvlink |", REDUCED)),
        *(
            ("all_gather_gemm", {**FUSED, "plan": {**FUSED["plan"], name: value}})
            for name, value in [
                ("bm", 0),
                ("bk", 96),
                ("stages", -1),
                ("warps", 3),
                ("reducers", 10**9),
                ("spread", 101),
            ]
        ),
        *(
            ("gemm_all_reduce", {**REDUCED, "plan": {**REDUCED["plan"], name: value}})
            for name, value in [("shots", 3), ("ctas", 0), ("block", 1000)]
        ),
        *(("all_gather_gemm", {**FUSED, "ms": {"reference": ms}}) for ms in (10**400, float("nan"), -1.0)),
        ("all_gather_gemm", {**FUSED, "gemm_ms": float("inf")}),
    ],
)
def test_an_answer_that_no_tuner_wrote_is_refused(key: str, answer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sends fp8|other operator|must be"):
        tuning_cache.usable(answer, key)


def test_every_plan_that_is_tried_or_ships_may_be_kept() -> None:
    plans = [entry.plan for entry in shipped_plans.entries()]
    for op, mp, ws in itertools.product(("all_gather_gemm", "gemm_reduce_scatter"), (16, 1024, 65536), (False, True)):
        plans += candidates(op, mp, 12288, 8192, 8, 132, ws)
        plans += [plan for p in (False, True) for plan in fp8_candidates(op, mp, 12288, 8192, 8, 132, ws, promoted=p)]
    for plan in plans:
        tuning_cache.usable({**FUSED, "plan": asdict(plan)}, "all_gather_gemm")
    for m in (1, 64, 8192):
        for plan in all_reduce_config.candidates(m, 8192, 1024, 8, 2):
            tuning_cache.usable({**FUSED, "plan": asdict(plan)}, "gemm_all_reduce")
    tuning_cache.usable(CHUNKED, "all_gather_gemm m=8 host wire=fp8 | GPU")


BASE = {"op": "all_gather_gemm", "m": 8, "n": 6, "k": 4, "dtype": torch.bfloat16, "transposed": False, "tp": 2}
BASE |= {"link": "nvlink", "captured": False}
IN_KEY: dict[str, dict[str, Any]] = {
    "op": {"op": "gemm_reduce_scatter"},
    **{name: {name: 16} for name in ("m", "n", "k", "tp")},
    "dtype": {"dtype": torch.float16},
    "form": {"transposed": True},
    "link": {"link": "p2p"},
    "captured": {"captured": True},
    "gpu": {"gpu": "another"},
    **{name: {name: "9.9"} for name in ("flux", "plan", "torch", "triton")},
    "nccl": {"nccl": (9, 9)},
    "nvls": {"NCCL_NVLS_ENABLE": "0"},
    "margin": {"MEGATRON_FLUX_SM_MARGIN": "8"},
    "connections": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
}
"""One change by part of a key."""
WORDS = {"|", "flux", "plan", "torch", "triton", "nccl"}  # of a key, which say what the next one is


def key_with(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """The words of a key on a machine of which all is known, but for ``changes``."""
    machine = {"gpu": "GPU", "flux": "1.1", "plan": "abc", "torch": "2.2", "triton": "3.3", "nccl": (4, 4)}
    machine |= {"NCCL_NVLS_ENABLE": "1", "MEGATRON_FLUX_SM_MARGIN": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    now = {**BASE, **machine, **changes}
    with monkeypatch.context() as patch:
        for name in ("NCCL_NVLS_ENABLE", "MEGATRON_FLUX_SM_MARGIN", "CUDA_DEVICE_MAX_CONNECTIONS"):
            patch.setenv(name, now[name])
        patch.setattr(torch.cuda, "get_device_name", lambda device: now["gpu"])
        patch.setattr(torch.cuda.nccl, "version", lambda: now["nccl"])
        patch.setattr(torch, "__version__", now["torch"])
        patch.setattr(tuning_cache, "__version__", now["flux"])
        patch.setattr(tuning_cache, "plan_schema", lambda kind: now["plan"])
        patch.setattr(tuning_cache.metadata, "version", lambda package: now["triton"])
        patch.setattr(tuning_cache, "_machine", tuning_cache._machine.__wrapped__)
        x = SimpleNamespace(dtype=now["dtype"], device=torch.device("cuda", 0))
        call = (now[name] for name in ("op", "m", "n", "k"))
        more = (now[name] for name in ("transposed", "tp", "link"))
        return tuning_cache.describe(*call, x, *more, captured=now["captured"]).split(" ")  # type: ignore[arg-type]


def test_every_part_of_a_key_changes_with_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    base = key_with(monkeypatch)
    assert key_with(monkeypatch) == base
    tested: set[str] = set()
    for part, change in IN_KEY.items():
        gone = set(base) - set(key_with(monkeypatch, **change))
        assert gone or part == "captured", f"{part} is not in the key"
        assert part != "captured" or key_with(monkeypatch, **change) != base
        tested |= gone
    assert set(base) - tested == WORDS, "a part of the key that nothing here changes"


def test_a_field_more_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tuning_cache.plan_schema.__wrapped__()
    monkeypatch.setattr(tuning_cache, "fields", lambda plan: fields(plan)[:-1])
    assert tuning_cache.plan_schema.__wrapped__() != before


def test_a_disk_that_is_full_is_logged_and_left_no_fuller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("MEGATRON_FLUX_TUNE_CACHE", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(os, "replace", full)
    tuning_cache.keep("a", {"backend": "reference", "plan": None, "ms": {}})
    assert "No space left on device" in caplog.text
    assert str(tmp_path / "tuned.json") in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [".tuned.json.lock"]


def test_warp_specialised_plans_for_hopper() -> None:
    # 2.2 rounds of whole tiles cost three; 4.4 of half ones five times 0.53.
    assert ag_config(256, 9216, 12288, 4, 132, ws=True) == KernelConfig(ws=True, group=16, bn=128, stages=6)
    assert ag_config(2048, 12288, 12288, 4, 132, ws=True) == KernelConfig(ws=True, group=16)
    # Short products are bound by the link: no pacing.
    assert rs_config(2048, 12288, 3072, 4, 132, ws=True) == KernelConfig(ws=True, stages=3, ring=4, spread=75)
    assert rs_config(2048, 12288, 1536, 4, 132, ws=True).spread == 0


def test_shards_of_eight_row_blocks_may_be_done_two_at_a_time() -> None:
    def spans(mp: int, n: int, tp: int) -> set[int]:
        return {plan.span for plan in candidates("all_gather_gemm", mp, n, 12288, tp, 132, ws=True)}

    assert spans(1024, 6144, 8) == {1, 2}
    assert spans(2048, 6144, 4) == {1}  # 16 row blocks as they are
    assert spans(1024, 1280, 8) == {1}  # bound by the link: who waits for two shards waits longer
    assert spans(1024, 6144, 2) == {1}  # no second shard to come


def test_bands_of_a_scatter() -> None:
    # Four of four ranks are 16 row blocks; 132 SMs, 48 columns of tiles: three row blocks of own tiles fill a round.
    found = candidates("gemm_reduce_scatter", 2048, 12288, 3072, 4, 132, ws=True)
    assert {plan.band for plan in found} == {1, 4, 3}
    assert {plan.band for plan in candidates("gemm_reduce_scatter", 1024, 12288, 6144, 8, 132, ws=True)} == {1, 2, 3}
    assert {plan.band for plan in candidates("gemm_reduce_scatter", 100, 12288, 4096, 4, 132, ws=True)} == {1}


def test_sms_that_no_round_needs_add_partials() -> None:
    aside, all_sms = KernelConfig(ws=True, aside=True), KernelConfig(ws=True)
    # 16 x 48 tiles of four ranks are 23.3 rounds of 132, and 24 of 128; 4 x 33 of one fill one round.
    assert workers(aside, 2048, 12288, 4, 132) == 128
    assert workers(all_sms, 2048, 12288, 4, 132) == 132
    assert workers(aside, 128, 33 * 256, 4, 132) == 132, "none is idle"
    assert workers(aside, 128, 65 * 256, 4, 132) == 132, "two are too few to add what 130 multiply"
    assert workers(aside, 128, 256, 4, 132) == 4

    def first(n: int, k: int, promoted: bool, mp: int = 2048) -> bool:
        return fp8_config("gemm_reduce_scatter", mp, n, k, 4, 132, True, promoted=promoted).aside

    assert first(8192, 7168, True)
    assert not first(8192, 3584, True)
    assert not first(8192, 7168, False)
    assert not first(33 * 256, 7168, True, mp=128)
    assert not rs_config(2048, 8192, 7168, 4, 132, ws=True).aside
    for n in (8192, 33 * 256):
        for found in (
            candidates("gemm_reduce_scatter", 128, n, 7168, 4, 132, True),
            *(fp8_candidates("gemm_reduce_scatter", 128, n, 7168, 4, 132, True, promoted=p) for p in (False, True)),
        ):
            assert {plan.aside for plan in found} == ({True, False} if n == 8192 else {False})


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_candidates_for_hopper_are_warp_specialised_and_begin_with_the_default(op: str) -> None:
    default = {"all_gather_gemm": ag_config, "gemm_reduce_scatter": rs_config}[op](2048, 12288, 6144, 4, 132, ws=True)
    found = candidates(op, 2048, 12288, 6144, 4, 132, ws=True)
    assert found[0] == default
    assert len(found) == len(set(found)) == (5 if op == "all_gather_gemm" else 9)
    assert all(plan.ws for plan in found)


def test_a_shard_of_one_block_of_columns_is_not_cut_and_measured_again() -> None:
    found = candidates("all_gather_gemm", 2048, 12288, 64, 4, 132, ws=True)
    assert len(found) == 2
    assert not any(plan.early or plan.late for plan in found)


# What a half's flags are enough for; ops/launch/plain.py raises otherwise.

LARGE = [(131072, 16384, 8192), (262144, 16384, 1024), (1 << 20, 256, 64), (1 << 20, 16384, 64)]


@pytest.mark.parametrize("ws", [False, True])
@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_no_candidate_needs_more_flags_than_there_are(
    op: str, m: int, n: int, k: int, tp: int, ws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the launch itself, which checks before it takes a turn of the slab."""
    pytest.importorskip("triton")
    from megatron_flux.ops import launch

    def begin() -> None:
        raise StopIteration("the checks are behind")

    work = SimpleNamespace(rank=0, tp=tp, begin=begin)
    monkeypatch.setattr(launch, "unbroken", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(launch, "sm_count", lambda _: 132)
    x = torch.empty((m // tp if op == "all_gather_gemm" else m, k), device="meta", dtype=torch.bfloat16)
    weight = torch.empty((n, k), device="meta", dtype=torch.bfloat16)
    found = candidates(op, m // tp, n, k, tp, 132, ws)
    for plan in found:
        with pytest.raises(StopIteration):
            getattr(launch, op)(OperatorCall(op, x, weight, group_of(tp)), work, plan, None)
    if (op, m, n) == ("gemm_reduce_scatter", 131072, 16384):
        assert found, "wide tiles fit"
        assert all(plan.bn == 256 for plan in found)
    if (op, m, n) == ("gemm_reduce_scatter", 262144, 16384):
        assert found == [], "stock runs it"


@pytest.mark.parametrize("mp", [256, 260, 130])
@pytest.mark.parametrize("operator", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_scales_of_a_shard_begin_where_tma_can_read(operator: str, mp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "_has_tma", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    rows = mp if operator == "all_gather_gemm" else 2 * mp
    numbers, weight = torch.randn(rows, 256), torch.randn(128, 256)
    for scaling, of_weight in (("tensor", "tensor"), ("1x128", "128x128")):
        pair = Fp8Pair(quantized(numbers, scaling), quantized(weight, of_weight))
        call = OperatorCall(operator, pair.x.numbers, pair.weight.numbers, group_of(2), fp8=pair)
        if operator == "all_gather_gemm":
            assert launch.hopper_kernels(call) == (mp % 128 == 0)
        else:
            assert launch.hopper_kernels(call) == (scaling == "tensor" or mp % 4 == 0)
