"""Predictions: the formulae against the papers' closed forms, and what must hold whatever the figures are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.bench.shapes import Case, layer_cases
from megatron_flux.errors import UserError
from megatron_flux.estimate.job import Job, PlanOptions, resolve
from megatron_flux.estimate.prediction import bytes_against_weights, predict_options, why_stock
from megatron_flux.estimate.rates import DEVICES, Calibration, Rates, device_named
from megatron_flux.estimate.step import (
    Layer,
    Phase,
    Stage,
    add_up,
    column_backward,
    flux_workspace,
    layer_activations,
    predict_layer,
    predict_memory,
    predict_stages,
    stage_parameters,
)
from megatron_flux.metrics.report.plans import PARTS

H100 = DEVICES["h100-sxm"]
GPT = LAYER_MODELS["gpt3-175b"]


def job(**options: Any) -> Job:
    return resolve(PlanOptions(**options))


def plan(**options: Any) -> dict[str, Any]:
    return predict_options(PlanOptions(**{"host_ms_per_layer": 0.0, **options}))


def flat_stages(pp: int, ms: float) -> list[Stage]:
    layer = Layer(Phase(ms / 3), Phase(2 * ms / 3))
    return [Stage(layer, Layer(), 0.0)] * pp


# --- pipeline, arXiv 2104.04473


@pytest.mark.parametrize(("chunks", "bubble"), [(1, 7 / 32), (3, 7 / 96)])
def test_bubble_is_the_papers_share(chunks: int, bubble: float) -> None:
    chosen = job(virtual_pipeline=chunks, network_gb_per_s=1e9)
    step = add_up(chosen, Rates(device=H100, network_gb_per_s=1e9), flat_stages(8, 30.0))
    assert chosen.run.micro_batches == 32
    assert step["bubble"] / (32 * 30.0) == pytest.approx(bubble, rel=1e-6)  # (pp - 1)/(m v)
    assert step["pipeline"] == pytest.approx(32 * 30.0 * (1 + bubble), rel=1e-6)


def test_the_slowest_stage_sets_the_pace() -> None:
    chosen, rates = job(), Rates(device=H100, network_gb_per_s=1e9)
    even, uneven = flat_stages(8, 30.0), flat_stages(7, 30.0) + flat_stages(1, 40.0)
    fast, slow = (add_up(chosen, rates, stages)["pipeline"] for stages in (even, uneven))
    assert slow - fast == pytest.approx(32 * 10.0, rel=1e-3)


def test_every_micro_batch_waits_for_its_neighbours_unless_interleaved() -> None:
    plain, interleaved = (add_up(job(virtual_pipeline=v), Rates(device=H100), flat_stages(8, 30.0)) for v in (1, 3))
    hop = 2 * 8192 * 12288 / 8 / (0.86 * 50e6)  # rows of a rank, bf16, over 86 % of 50 GB/s
    assert plain["point_to_point"] == pytest.approx(2 * 32 * hop)
    assert interleaved["point_to_point"] == pytest.approx(2 * 7 * hop)


# --- data parallelism and optimizer


def test_gradients_and_parameters_travel_as_a_ring() -> None:
    chosen = job(gpus=512)
    step = add_up(chosen, Rates(device=H100), flat_stages(8, 30.0))
    count = max(stage_parameters(chosen, index) for index in range(8))
    assert chosen.run.dp == 8
    assert step["data"] == pytest.approx(7 / 8 * count * (4 + 2) / (0.86 * 50e6))


def test_overlap_hides_all_but_a_bucket() -> None:
    options: dict[str, Any] = {"gpus": 512, "pp": 8}
    off = add_up(job(**options), Rates(device=H100), flat_stages(8, 3000.0))
    overlapped = job(**options, overlap_grad_reduce=True, overlap_param_gather=True)
    on = add_up(overlapped, Rates(device=H100), flat_stages(8, 3000.0))
    short = add_up(overlapped, Rates(device=H100), flat_stages(8, 30.0))
    assert short["data"] == pytest.approx(off["data"] - 30.0)  # one micro-batch's backward and one's forward
    assert on["data"] == pytest.approx(off["data"] * 40e6 / stage_parameters(overlapped, 1), rel=0.05)
    assert on["data"] < short["data"] < off["data"]


def test_one_replica_has_nothing_to_reduce() -> None:
    assert plan(gpus=64)["arms"]["baseline"]["step"]["data"] == 0


def test_replicas_in_a_node_share_its_link() -> None:
    near = plan(gpus=8, tp=2, pp=1, preset="tiny", num_layers=8)["arms"]["baseline"]["step"]["data"]
    far = plan(gpus=8, tp=2, pp=1, preset="tiny", num_layers=8, gpus_per_node=2)["arms"]["baseline"]["step"]["data"]
    assert far / near == pytest.approx((0.65 * 450) / (0.86 * 50))


# --- memory, arXiv 2205.05198


def test_activations_are_the_papers_34_sbh() -> None:
    assert layer_activations(GPT, 8192, 8, dropout=True) == 34 * 8192 * 12288 / 8
    assert layer_activations(GPT, 8192, 8, "full") == 2 * 8192 * 12288 / 8


@pytest.mark.parametrize(("distributed", "per_parameter"), [(True, 6 + 12 / 4), (False, 18)])
def test_bytes_per_parameter(distributed: bool, per_parameter: float) -> None:
    chosen = job(gpus=256, distributed_optimizer=distributed)
    memory = predict_memory(chosen, "baseline")
    assert chosen.run.dp == 4
    total = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert total * 1e9 == pytest.approx(per_parameter * stage_parameters(chosen, 0))


def test_the_first_stage_holds_a_micro_batch_for_every_stage() -> None:
    one, full = 34 * 8192 * 12288 / 8 / 1e9, job(dropout=0.1)
    mask = 8192 * 12288 / 8 / 1e9  # of the embedding's dropout
    assert predict_memory(full, "baseline")["activations"] == pytest.approx(8 * (12 * one + mask))
    interleaved = predict_memory(job(dropout=0.1, virtual_pipeline=3), "baseline")["activations"]
    assert interleaved == pytest.approx(8 * (1 + 7 / 24) * (12 * one + mask))  # section 4.2.3


def test_parameters_add_up_to_the_model() -> None:
    chosen = job(preset="llama2-70b")
    total = 8 * sum(stage_parameters(chosen, index) for index in range(8))
    assert total == pytest.approx(68.98e9, rel=1e-3)  # the model's name rounds it up


def test_workspace_is_within_its_bound_and_flux_alone_pays_it() -> None:
    bound = 4 * 8192 * 12288 * 2
    assert bound <= flux_workspace(8192, 12288) <= 1.13 * bound  # sizes are rounded up by an eighth at most
    assert predict_memory(job(), "baseline")["flux_workspace"] == 0
    assert predict_memory(job(), "flux")["flux_workspace"] * 1e9 == flux_workspace(8192, 12288)


# --- layers


def test_without_communication_the_arms_are_equal() -> None:
    fast = replace(H100, step_us=0.0)
    rates = Rates(device=fast, link_gb_per_s=1e12, calibration=Calibration(traffic=0.0))
    for layer in (predict_layer(rates, arm, GPT, 2048, 4, 8) for arm in ("baseline", "flux")):
        assert layer.total == pytest.approx(layer.both.compute, rel=1e-6)


def test_the_baseline_exposes_six_collectives_and_pays_for_four() -> None:
    rates = Rates(device=H100)
    layer = predict_layer(rates, "baseline", GPT, 2048, 4, 8)
    one = rates.collective(2 * 7 * 1024 * 12288, 8)
    exposed = layer.forward.exposed + layer.backward.exposed
    assert layer.forward.collectives + layer.backward.collectives == pytest.approx(10 * one)
    assert layer.forward.exposed == pytest.approx(4 * one)
    assert exposed == pytest.approx(6 * one + 4 * 24 / 132 * one)


def test_perfect_overlap_leaves_only_the_disturbance() -> None:
    rates = Rates(device=H100, overlap=1.0)
    layer = predict_layer(rates, "flux", GPT, 2048, 4, 8)
    lost = rates.disturbance(10 * 2 * 7 * 1024 * 12288)
    # proj is short for its collective at tp 8: the link binds there, in both directions.
    pair = rates.pair(Case("gemm_reduce_scatter", "", "proj", "forward", 8192, 12288, 1536), 8)
    bound = 2 * (pair.collective - pair.gemm)
    assert bound > 0
    assert layer.forward.exposed + layer.backward.exposed == pytest.approx(lost + bound)


def test_what_is_gathered_ahead_leaves_the_link_to_dgrad() -> None:
    rates = Rates(device=H100, overlap=1.0, calibration=Calibration(traffic=0.0))
    (qkv,) = (c for c in layer_cases("", LAYER_MODELS["llama-70b"], 8192, "dgrad", 8) if c.layer == "qkv")
    pair = rates.pair(qkv, 8)
    gather = rates.collective(2 * 7 * 1024 * qkv.n, 8)
    assert pair.gemm < gather  # the link binds

    def after(before: float) -> float:
        phase = column_backward(rates, "flux", 8192, qkv.k, qkv.n, 8, pair, before)
        return phase.total - rates.gemm(qkv.k, qkv.n, 8192)

    assert after(0.0) == pytest.approx(gather + pair.collective)
    assert after(gather / 4) == pytest.approx(gather * 3 / 4 + pair.collective)
    assert after(gather) == after(2 * gather) == pytest.approx(pair.fused)


def test_x_is_gathered_beside_what_runs_before_a_column_layer() -> None:
    # A link on which the gather takes longer than proj's wgrad with attention's backward, and than FC2's wgrad.
    rates = Rates(device=H100, link_gb_per_s=5.0, overlap=1.0, calibration=Calibration(traffic=0.0))
    cases = {case.layer: case for case in layer_cases("", GPT, 8192, "dgrad", 8)}
    one = rates.collective(2 * 7 * 1024 * 12288, 8)
    attention = 1e3 * 2 * 2048**2 * 12288 * 4 / 8 / (0.35 * 989.4e12)
    wgrad = {name: rates.gemm(case.k, case.n, 8192) for name, case in cases.items()}
    assert one > wgrad["fc2"] + 2.5 * attention
    backward = predict_layer(rates, "flux", GPT, 2048, 4, 8).backward
    hidden = wgrad["proj"] + 2.5 * attention + wgrad["fc2"] + sum(rates.pair(c, 8).gemm for c in cases.values())
    assert backward.collectives == pytest.approx(6 * one)
    assert backward.exposed == pytest.approx(6 * one - hidden)


def test_the_output_layer_gathers_its_own_x() -> None:
    chosen = job(preset="llama3-70b", gpus=8, tp=8, pp=1, num_layers=1)
    rates = Rates(device=H100, link_gb_per_s=5.0, overlap=1.0, calibration=Calibration(traffic=0.0))
    (stage,) = predict_stages(chosen, rates, "flux")
    one = rates.collective(2 * 7 / 8 * chosen.tokens * chosen.run.shape.hidden_size, 8)
    columns = chosen.run.padded_vocab_size // 8
    embedding = 2 * one
    forward = rates.pair(Case("all_gather_gemm", "", "", "forward", chosen.tokens, columns, 8192), 8)
    dgrad = rates.pair(Case("gemm_reduce_scatter", "", "", "dgrad", chosen.tokens, 8192, columns), 8)
    vocabulary = stage.vocabulary.forward.exposed + stage.vocabulary.backward.exposed
    exposed = embedding + forward.fused - forward.gemm + 2 * one - dgrad.gemm
    assert 2 * one > dgrad.fused
    assert vocabulary == pytest.approx(exposed)


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("model", ["gpt3-175b", "llama-70b"])
def test_calls_are_within_their_bounds_and_layers_cost_communication(device: str, model: str) -> None:
    for link in (None, 100.0, 10.0):
        for tp, micro_batch in ((2, 1), (8, 1), (8, 4)):
            rates = Rates(device=DEVICES[device], link_gb_per_s=link)
            for case in layer_cases(model, LAYER_MODELS[model], 2048 * micro_batch, "forward", tp):
                pair = rates.pair(case, tp)
                assert max(pair.gemm, pair.collective) <= pair.fused <= pair.serial
            for arm in ("baseline", "flux"):
                layer = predict_layer(rates, arm, LAYER_MODELS[model], 2048, micro_batch, tp)
                assert layer.both.compute < layer.total


def test_recomputation_runs_the_forward_again() -> None:
    rates = Rates(device=H100)
    none, selective, full = (
        predict_layer(rates, "baseline", GPT, 2048, 4, 8, how) for how in ("none", "selective", "full")
    )
    assert full.total == pytest.approx(none.total + none.forward.total)
    attention = 1e3 * 2 * 2048**2 * 12288 * 4 / 8 / (0.35 * 989.4e12)
    assert selective.total == pytest.approx(none.total + attention)


# --- the whole


@pytest.mark.parametrize("options", [{}, {"device": "a100-pcie"}, {"virtual_pipeline": 3, "recompute": "full"}])
def test_parts_add_up_to_the_step(options: dict[str, Any]) -> None:
    found = plan(**options)
    for arm in found["arms"].values():
        assert all(part(arm["step"]) >= 0 for _, part in PARTS.values())
        assert sum(part(arm["step"]) for _, part in PARTS.values()) == pytest.approx(arm["step"]["total"])
    assert found["kind"] == "Prediction"


def test_the_speedup_is_a_range() -> None:
    found = plan()
    assert 1 < found["speedup"] < found["speedup_undisturbed"] < 1.3


def test_slower_links_cost_time_and_the_own_link_is_in_the_table() -> None:
    found = plan()
    rows = found["sensitivity"]
    assert [row["reached_gb_per_s"] for row in rows] == sorted((r["reached_gb_per_s"] for r in rows), reverse=True)
    for faster, slower in itertools.pairwise(rows):
        assert faster["baseline_ms"] < slower["baseline_ms"]
        assert faster["flux_ms"] < slower["flux_ms"] <= slower["flux_low_ms"]
    assert min(row["reached_gb_per_s"] for row in rows) >= 35, "slower links are no NVLink, where flux runs stock"
    own = Rates(device=H100).reached
    assert next(r for r in rows if r["reached_gb_per_s"] == own)["baseline_ms"] == pytest.approx(
        found["arms"]["baseline"]["step"]["total"]
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": 1, "pp": 8}, "tp = 1"),
        ({"tp": 16, "pp": 8}, "spans nodes of 8"),
        ({"gpus_per_node": 4}, "tp 8 spans nodes of 4"),
        ({"tp": 16, "pp": 8, "gpus_per_node": 16}, "2, 4 or 8 ranks, not 16"),
        ({"device": "a100-pcie"}, "no NVLink between the GPUs of a node"),
        ({"device": "l20", "preset": "llama2-70b", "recompute": "full"}, "no NVLink between the GPUs of a node"),
    ],
)
def test_where_flux_runs_stock_nothing_is_gained(options: dict[str, Any], reason: str) -> None:
    assert reason in (why_stock(job(**options)) or "")
    found = plan(**options)
    assert found["speedup"] == found["speedup_undisturbed"] == 1
    assert found["arms"]["flux"] == found["arms"]["baseline"]
    assert any(reason in note for note in found["notes"])
    assert found["sensitivity"] == []


def test_a_slow_host_is_said() -> None:
    found = plan(micro_batch_size=1, device="h200", host_ms_per_layer=20.0)
    slow = found["arms"]["baseline"]["step"]
    assert slow["host"] > 0
    assert slow["pipeline"] > 20.0 * 12 * found["job"]["micro_batches"]


def test_what_does_not_fit_is_said() -> None:
    found = plan(gpus=64, pp=4, dropout=0.1)
    assert found["fits"] == {"baseline": False, "flux": False}
    assert any("--recompute full" in note for note in found["notes"])
    assert plan()["fits"]["baseline"]
    memory = predict_memory(job(), "baseline")
    both = memory["total"] + memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert any(
        f"a compare job holds both arms' parameters, gradients and optimizer: {both:.0f} GB" in n
        for n in plan()["notes"]
    )


def test_the_largest_job_is_planned() -> None:
    assert plan(gpus=16384, preset="llama3-70b")["job"]["dp"] == 256


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 100}, "100 GPUs cannot be split into tp 8 x pp 8; use --gpus with a multiple of 64"),
        ({"gpus": 12, "tp": 4, "pp": 3}, "12 GPUs do not fill nodes of 8; use --gpus with a multiple of 8"),
        ({"gpus": 112, "pp": 7}, "layers 96 must be divisible by pp 7"),
        ({"preset": "llama2-70b", "tp": 16}, "query groups 8 must be divisible by tp 16"),
        ({"seq_length": 2050}, "sequence length 2050 must be divisible by tp 8"),
        ({"virtual_pipeline": 5}, r"use --virtual-pipeline with one of \[1, 2, 3, 4, 6, 12\]"),
        ({"virtual_pipeline": 3, "global_batch_size": 72}, "a multiple of pp 8 micro-batches, there are 9"),
        ({"virtual_pipeline": 2, "pp": 1, "tp": 8}, "needs a pipeline, pp is 1"),
        ({"device": "h300"}, "unknown device 'h300'; use one of: h200"),
        ({"preset": "gpt-5"}, "unknown preset 'gpt-5'"),
    ],
)
def test_impossible_layouts_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        job(**options)
    assert "\n" not in str(error.value)


def test_cards_are_told_from_modules() -> None:
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA A100-SXM4-80GB": "a100-sxm",
        "NVIDIA A100 80GB PCIe": "a100-pcie",
        "NVIDIA L20": "l20",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA L40S": "l40s",
        "NVIDIA H200 NVL": None,
        "NVIDIA GH200 480GB": None,
        "NVIDIA A100-PCIE-40GB": None,
        "NVIDIA A30 PCIe": None,
        "Tesla T4": None,
    }
    for name, key in names.items():
        found = device_named(name)
        assert (found.key if found else None) == key, name


# --- where tensor parallelism is the wrong choice


def test_where_weights_would_be_fewer_bytes_that_is_said() -> None:
    def said(**options: Any) -> list[str]:
        return [note for note in plan(preset="gpt3-175b", **options)["notes"] if "the layers' weights" in note]

    hidden = 12288  # break-even at 3.6 of them: 44,236.8 tokens
    assert said(seq_length=2048, micro_batch_size=1) == []
    assert said(seq_length=44_032, micro_batch_size=1) == []
    (note,) = said(seq_length=2048, micro_batch_size=44)
    assert (
        f"micro-batches of {44 * 2048:,} tokens tensor parallelism moves {44 * 2048 / (3.6 * hidden):.1f} times" in note
    )
    assert bytes_against_weights(job(preset="gpt3-175b", seq_length=36_864, micro_batch_size=1).run) == pytest.approx(
        36_864 / (3.6 * hidden)
    )
    assert bytes_against_weights(job(preset="tiny", tp=1, pp=1, gpus=1, gpus_per_node=1).run) == 0
