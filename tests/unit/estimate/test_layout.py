"""Every rank of the 128-GPU layout in this process: groups, places, shapes, and how flux would run there."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from megatron_flux.errors import FluxError, UserError
from megatron_flux.estimate import layout
from megatron_flux.estimate.job import Job, PlanOptions, resolve
from megatron_flux.estimate.layout import check, linears, problems
from megatron_flux.estimate.prediction import NO_NVLINK
from megatron_flux.estimate.report import show_layout
from megatron_flux.ops.backends.fused import limit
from megatron_flux.patch.linears import LinearPatch


def job(**options: Any) -> Job:
    return resolve(PlanOptions(**options))


def small(**options: Any) -> Job:
    return job(preset="tiny", **{"gpus": 8, "tp": 2, "pp": 2, **options})


@pytest.fixture(scope="module")
def paper() -> dict[str, Any]:
    """TP 8 x PP 8 x DP 2, FLUX's layout."""
    return check(job(device="h200"))


def test_all_128_ranks_are_where_they_belong(paper: dict[str, Any]) -> None:
    assert paper["problems"] == []
    assert [view["rank"] for view in paper["ranks"]] == list(range(128))
    for view in paper["ranks"]:
        # tp runs fastest, then dp, then pp.
        tp, dp, pp = view["rank"] % 8, view["rank"] // 8 % 2, view["rank"] // 16
        assert view["places"] == {"tp": tp, "dp": dp, "pp": pp}
        assert view["groups"]["tp"] == tuple(range(view["rank"] - tp, view["rank"] - tp + 8))
        assert view["groups"]["dp"] == (pp * 16 + tp, pp * 16 + 8 + tp)
        assert view["groups"]["pp"] == tuple(range(dp * 8 + tp, 128, 16))
        assert (view["node"], view["gpu"]) == (view["rank"] // 8, tp)
        assert (view["link"], view["backend"], view["reason"]) == ("nvlink", "tuned", None)


def test_every_stage_is_built_and_runs_flux(paper: dict[str, Any]) -> None:
    assert [found["stage"] for found in paper["stages"]] == list(range(8))
    for found in paper["stages"]:
        last = found["stage"] == 7
        assert found["layers"] == 12
        assert found["flux_layers"] == (5 if last else 4)  # QKV, proj, FC1, FC2, and the output layer
        assert found["output"] == ((4, 2048, 51200 // 8) if last else (2048 // 8, 4, 12288))
        # Forward and dgrad of a row-parallel linear are one call each, and so of a column-parallel one.
        gathers = {"all_gather_gemm/reference": 5 if last else 4, "gemm_reduce_scatter/reference": 5 if last else 4}
        assert found["calls"] == {**gathers, "all_gather/reference": 3 if last else 2}


def test_the_layers_calls_have_the_ranks_own_shapes(paper: dict[str, Any]) -> None:
    shapes = {(c["layer"], c["direction"]): (c["op"], c["m"], c["n"], c["k"]) for c in paper["linears"]}
    assert shapes["qkv", "forward"] == ("all_gather_gemm", 8192, 3 * 12288 // 8, 12288)
    assert shapes["fc2", "forward"] == ("gemm_reduce_scatter", 8192, 12288, 49152 // 8)
    assert shapes["fc2", "dgrad"] == ("all_gather_gemm", 8192, 49152 // 8, 12288)
    assert {c["kernel"] for c in paper["linears"]} == {"hopper"}


def test_the_process_is_left_as_it_was(paper: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    import megatron_flux

    assert not dist.is_initialized()
    assert not parallel_state.is_initialized()
    assert not megatron_flux.is_patched()


@pytest.mark.parametrize(
    ("options", "backend", "reason"),
    [
        ({}, "tuned", None),
        ({"tp": 1}, "reference", "tp = 1"),
        ({"gpus_per_node": 1}, "reference", "no peer access within the group: tp 2 spans nodes of 1 GPUs"),
        ({"device": "a100-pcie"}, "reference", NO_NVLINK),
    ],
)
def test_what_flux_would_do_and_why(options: dict[str, Any], backend: str, reason: str | None) -> None:
    found = check(small(**options))
    assert found["problems"] == []
    assert {(view["backend"], view["reason"]) for view in found["ranks"]} == {(backend, reason)}
    link = "none" if options.get("gpus_per_node") else "p2p" if "device" in options else "nvlink"
    assert {view["link"] for view in found["ranks"]} == {link}
    out = Console(file=io.StringIO(), width=300)
    show_layout(found, small(**options), out)
    said = out.file.getvalue()
    assert ("before tuning" in said) is (reason is None)
    assert (f"flux runs stock: {reason}" in said) is (reason is not None)
    assert found["ranks"][5]["groups"]["pp"] == (1, 5)


def test_cards_get_the_plain_kernels() -> None:
    assert {c["kernel"] for c in linears(job(device="a100-pcie"))} == {"triton"}
    assert {
        c["kernel"] for c in linears(job(micro_batch_size=1, seq_length=256, device="h200")) if "gather" in c["op"]
    } == {"triton"}  # 32 rows a rank are no whole tile


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "shielded", "reason"),
    [
        ("bfloat16", 8, (9, 0), True, None),
        ("float32", 8, (9, 0), True, "bf16, fp16 or FP8"),
        ("bfloat16", 3, (9, 0), True, "2, 4 or 8 ranks, not 3"),
        ("bfloat16", 8, (7, 5), True, "compute capability 8.0, this GPU has 7.5"),
        ("bfloat16", 8, (9, 0), False, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ],
)
def test_limits_of_the_fused_backend(
    dtype: str, size: int, capability: tuple[int, int], shielded: bool, reason: str | None
) -> None:
    import torch

    found = limit(getattr(torch, dtype), size, capability, 128, shielded=shielded)
    assert (found is None) if reason is None else reason in (found or "")
    assert limit(torch.bfloat16, 8, (9, 0), 8, shielded=False) is None  # nobody else is there to block


def test_a_stage_that_megatron_cannot_build_is_named() -> None:
    good = small()
    shape = good.run.shape.model_copy(update={"ffn_hidden_size": 511})
    bad = replace(good, run=good.run.model_copy(update={"shape": shape}))
    with pytest.raises(FluxError, match=r"rank 0, pipeline stage 0: AssertionError: 511 is not divisible by 2"):
        check(bad)
    assert not dist.is_initialized()


def test_a_stage_with_other_parameters_than_planned_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_flux.estimate.layout.stage_parameters", lambda job, index: 1)
    with pytest.raises(FluxError, match="rank 0, pipeline stage 0: megatron-core builds 247424 parameters, the plan"):
        check(small(gpus=4, tp=1, pp=2))


def test_a_layer_that_would_run_stock_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearPatch, "why_stock_common", lambda self, layer, x, weight: "made up")
    with pytest.raises(FluxError, match=r"rank 0, pipeline stage 0: FallbackError: .* cannot run flux: made up"):
        check(small())


def test_ranks_that_disagree_are_found() -> None:
    chosen = small()
    good = check(chosen)["ranks"]
    assert problems(chosen, good) == []
    wrong = list(good)
    wrong[3] = dict(good[3], groups={**good[3]["groups"], "tp": (1, 3)})
    found = problems(chosen, wrong)
    assert "rank 3, tp group [1, 3]: rank 1 is in [0, 1]" in found
    assert "rank 2, tp group [2, 3]: rank 3 is in [1, 3]" in found
    assert "the tp groups do not cover every rank once" in found
    wrong[3] = dict(good[3], places={**good[3]["places"], "pp": 1})
    assert any(
        line.startswith("rank 3, pp group") and "not the rank itself" in line for line in problems(chosen, wrong)
    )
    assert "8 ranks have 7 different places in tp x pp x dp" in problems(chosen, wrong)
    wrong[3] = dict(good[3], groups={**good[3]["groups"], "dp": (1,)}, link="none")
    assert {"rank 3, dp group [1]: 1 ranks, not 2", "rank 3, tp group [2, 3]: on more than one node"} <= set(
        problems(chosen, wrong)
    )


def test_more_ranks_than_can_be_visited_are_refused() -> None:
    with pytest.raises(UserError, match="up to 1024, and the job has 2048; lower --gpus"):
        check(job(gpus=2048))


def test_a_process_with_groups_is_refused() -> None:
    with layout._world(0, small()), pytest.raises(UserError, match="has process groups already"):
        check(small())
