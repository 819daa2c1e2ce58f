"""Predictions from measured times: what they take from the files, how far they are off, and what the docs say of it."""

from __future__ import annotations

import copy
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.bench.shapes import Case
from megatron_flux.errors import UserError
from megatron_flux.estimate.job import PlanOptions, resolve
from megatron_flux.estimate.measured import LARGEST_ERROR, LARGEST_SPEEDUP_ERROR, calibrate, validate
from megatron_flux.estimate.prediction import predict, predict_options
from megatron_flux.estimate.rates import (
    DEVICES,
    Calibration,
    MeasuredCalls,
    MeasuredLayers,
    Rates,
    read_layers,
    read_ops,
)
from megatron_flux.estimate.step import predict_stages
from megatron_flux.metrics.report import plans

ROOT = Path(__file__).parents[3]
OPS = [ROOT / "results/ops-h200x4-sustained" / name for name in ("m8192", "m2048")]
EARLIER = [ROOT / "results/ops-h200x4-nvlink" / name for name in ("m8192", "smaller")]
AHEAD, MORE = ROOT / "results/layer-h200x4-ahead/sustained", ROOT / "results/layer-h200x4-more"
LAYERS = [AHEAD / "gpt3", AHEAD / "llama", MORE / "small", MORE / "b405"]
H200 = DEVICES["h200"]
X = "\N{MULTIPLICATION SIGN}"


@pytest.fixture(scope="module")
def calls() -> MeasuredCalls:
    return read_ops(OPS)


@pytest.fixture(scope="module")
def layers() -> MeasuredLayers:
    return read_layers(LAYERS)


@pytest.fixture(scope="module")
def rates(calls: MeasuredCalls) -> Rates:
    return Rates(device=H200, calls=calls)


@pytest.fixture(scope="module")
def from_calls(rates: Rates, layers: MeasuredLayers) -> dict[str, Any]:
    return validate(rates, layers)


@pytest.fixture(scope="module")
def from_table(layers: MeasuredLayers) -> dict[str, Any]:
    return validate(Rates(device=H200), layers)


def test_measured_calls_stand_for_themselves(calls: MeasuredCalls, rates: Rates) -> None:
    assert len(calls.calls) == 32
    for call in calls.calls:
        pair = rates.pair(call.case, 4)
        same = [c for c in calls.calls if replace(c.case, model="", layer="") == replace(call.case, model="", layer="")]
        assert (pair.gemm, pair.serial) in [(c.gemm_ms, c.serial_ms) for c in same]
        assert pair.fused in [min(c.tuned_ms, c.serial_ms) for c in same]


def test_unmeasured_calls_are_like_their_neighbours(rates: Rates) -> None:
    half = rates.pair(Case("all_gather_gemm", "", "fc1", "forward", 8192, 6144, 12288), 8)
    whole = rates.pair(Case("all_gather_gemm", "", "fc1", "forward", 8192, 12288, 12288), 4)
    assert half.gemm == pytest.approx(whole.gemm / 2, rel=0.1)
    assert half.collective == pytest.approx(whole.collective * 7 / 6, rel=0.05)  # bytes received at tp 8 and 4
    assert half.gemm <= half.fused < half.serial


def test_another_link_changes_the_collective_alone(rates: Rates) -> None:
    case = Case("all_gather_gemm", "", "fc1", "forward", 8192, 12288, 12288)
    own, slow = rates.pair(case, 4), replace(rates, link_gb_per_s=45.0).pair(case, 4)
    assert slow.gemm == own.gemm
    assert slow.collective == pytest.approx(10 * own.collective, rel=0.1)


def test_nccl_times_are_fitted(calls: MeasuredCalls, rates: Rates) -> None:
    errors = [
        rates.collective(call.case.bytes_received(4), 4) / call.nccl_ms - 1 for call in calls.calls if call.tp == 4
    ]
    assert statistics.mean(map(abs, errors)) < 0.05


def test_a_fit_without_latency_is_one_of_bandwidth(calls: MeasuredCalls) -> None:
    """Where more bytes take longer by more than their share, the line would begin below 0."""
    found = []
    for call in calls.calls:
        nbytes = call.case.bytes_received(call.tp)
        found.append(replace(call, nccl_ms=nbytes / 250e6 * (0.9 if nbytes < 60e6 else 1.0)))
    fitted = MeasuredCalls(found, H200, ["made up"])
    assert fitted.step_ms == 0
    assert 250 <= 1 / fitted.ms_per_byte / 1e6 <= 250 / 0.9


def test_calls_through_host_memory_say_nothing_of_the_network() -> None:
    def step(*ops: Path) -> dict[str, Any]:
        options = {"preset": "gpt3-175b", "device": "h200", "gpus": 32, "tp": 16, "pp": 2, "link": "host"}
        return predict_options(PlanOptions(**options, ops=list(ops)))

    with_calls, without = step(ROOT / "results/host-link-h200x2/ops"), step()
    of_both = [plan["arms"]["baseline"]["step"]["tp_collectives"] for plan in (with_calls, without)]
    assert of_both[0] == pytest.approx(of_both[1])
    assert with_calls["inputs"]["nccl_reaches_gb_per_s"] == pytest.approx(43)
    assert "NCCL reaches 43.0 GB/s per GPU of a tensor-parallel group" in plans.sources(with_calls), "of no node"
    assert with_calls["arms"]["baseline"]["step"]["total"] == pytest.approx(
        without["arms"]["baseline"]["step"]["total"], rel=0.3
    )


def test_the_table_of_devices_has_what_was_measured(calls: MeasuredCalls) -> None:
    stock = read_ops(EARLIER)  # more sizes, and neither cuBLAS nor NCCL has changed since
    share = [2e3 * c.case.m * c.case.n * c.case.k / c.gemm_ms / H200.peak_flops for c in stock.calls]
    assert statistics.median(share) == pytest.approx(H200.gemm, abs=0.005)
    assert statistics.median(call.overlap for call in calls.calls) == pytest.approx(H200.overlap, abs=0.005)
    assert Rates(device=H200, calls=stock).reached == pytest.approx(H200.nccl * H200.link_gb_per_s, rel=0.005)
    assert stock.step_ms * 1e3 == pytest.approx(H200.step_us, abs=0.05)


def test_the_constants_are_those_of_the_layer_benchmark(layers: MeasuredLayers) -> None:
    found = calibrate(layers, layers.workloads())
    assert Calibration() == Calibration(round(found.streamed, 2), round(found.gap_ms, 2), round(found.traffic, 1))


def test_no_workload_is_its_own_input(rates: Rates, layers: MeasuredLayers, from_calls: dict[str, Any]) -> None:
    changed = copy.deepcopy(layers.rows)
    for row in changed:
        if row["model"] == "llama-70b":
            row["ms_per_layer"] *= 2
            row["breakdown"] = {name: 3 * value for name, value in row["breakdown"].items()}
    after = validate(rates, replace(layers, rows=changed))
    own, others = [], []
    for was, now in zip(from_calls["rows"], after["rows"], strict=True):
        (own if was["model"] == "llama-70b" else others).append(was["predicted_ms"] == now["predicted_ms"])
    assert own == [True] * 4
    assert not all(others)


@pytest.mark.parametrize("source", ["from_calls", "from_table"])
def test_the_docs_state_the_errors(source: str, request: pytest.FixtureRequest) -> None:
    told = request.getfixturevalue(source)
    text = (ROOT / "slurm/PLAN.md").read_text()
    start = "From `bench ops`" if source == "from_calls" else "From the table of devices"
    section = text.split(start)[1].split("\n\n###")[0]
    for row in told["rows"]:
        line = f"| {row['model']}, {row['seq']} {X} {row['micro_batch']} | {row['arm']} | {row['measured_ms']:.2f} | "
        assert f"{line}{row['predicted_ms']:.2f} | {row['error']:+.1%} |" in section
    for row in told["speedups"]:
        name = row["workload"].replace(" x ", f" {X} ").replace(" ", ", ", 1)
        assert f"| {name} | {row['measured']:.3f} | {row['predicted']:.3f} |" in section
    kinds = {"baseline": "stock (te)", "flux": "flux (flux_te, flux_local)", "floor": "floor"}
    for kind, name in kinds.items():
        errors = told["errors"][kind]
        assert f"| {name} | {errors['mean']:.1%} | {errors['largest']:.1%} |" in section
    assert f"| all | {told['mean_absolute_error']:.1%} | {told['largest_absolute_error']:.1%} |" in section
    gains = told["speedup_errors"]
    assert f"Of the speed-up: mean {gains['mean']:.3f}, largest {gains['largest']:.3f}." in section


def test_the_docs_state_the_errors_with_other_operator_times(layers: MeasuredLayers) -> None:
    told = validate(Rates(device=H200, calls=read_ops(EARLIER)), layers)
    text, gains = " ".join((ROOT / "slurm/PLAN.md").read_text().split()), told["speedup_errors"]
    said = f"off by {told['mean_absolute_error']:.1%} in the mean and {told['largest_absolute_error']:.1%} at most, "
    assert f"{said}the speed-up by {gains['mean']:.3f} and {gains['largest']:.3f}." in text


def test_the_docs_state_the_errors_of_memory(from_table: dict[str, Any]) -> None:
    text = (ROOT / "slurm/PLAN.md").read_text()
    assert len(from_table["memory"]) == 8
    for row in from_table["memory"]:
        name = row["workload"].replace(" x ", f" {X} ").replace(" ", ", ", 1)
        numbers = f"{row['measured_gb']:.2f} | {row['predicted_gb']:.2f} | {row['error']:+.1%}"
        assert f"| {name} | {row['arm']} | {numbers} |" in text


def test_what_outputs_and_the_docs_say_of_errors(from_calls: dict[str, Any], from_table: dict[str, Any]) -> None:
    both = (from_calls, from_table)
    largest = max(told["largest_absolute_error"] for told in both)
    off = max(told["speedup_errors"]["largest"] for told in both)
    assert (round(largest, 3), round(off, 3)) == (LARGEST_ERROR, LARGEST_SPEEDUP_ERROR)
    mean = 100 * max(told["mean_absolute_error"] for told in both)
    said = (
        f"off by {mean:.1f} % in the mean and {100 * largest:.1f} % at most, of flux's speed-up by {off:.3f} at most;"
    )
    assert said in " ".join((ROOT / "docs" / "slurm.md").read_text().split())


def test_no_layer_of_stock_or_flux_goes_into_a_prediction(
    rates: Rates, layers: MeasuredLayers, from_calls: dict[str, Any]
) -> None:
    floors = ("floor", "busy_floor")
    slow = [row if row["arm"] in floors else row | {"ms_per_layer": 2 * row["ms_per_layer"]} for row in layers.rows]
    after = validate(rates, replace(layers, rows=slow))
    for was, now in zip(from_calls["rows"], after["rows"], strict=True):
        assert now["predicted_ms"] == was["predicted_ms"]
        assert now["measured_ms"] == was["measured_ms"] * (1 if was["arm"] == "floor" else 2)


def test_measured_layers_replace_predicted_ones(rates: Rates, layers: MeasuredLayers) -> None:
    job = resolve(PlanOptions(device="h200", gpus=4, tp=4, pp=1, num_layers=8))
    for arm, name in (("baseline", "te"), ("flux", "flux_te")):
        row = next(r for r in layers.rows if (r["model"], r["micro_batch"], r["arm"]) == ("gpt3-175b", 4, name))
        (stage,) = predict_stages(job, rates, arm, layers)
        assert stage.layers.total == pytest.approx(8 * row["ms_per_layer"])
    floor = layers.ms("floor", *job.sizes)
    assert floor is not None
    assert stage.layers.forward.compute + stage.layers.backward.compute == pytest.approx(8 * floor)


def test_layers_of_another_layout_are_not_used_and_it_is_said(layers: MeasuredLayers) -> None:
    job = resolve(PlanOptions(device="h200"))
    with_them, without = (predict(job, Rates(device=job.device), given) for given in (layers, None))
    assert with_them["arms"] == without["arms"]
    assert any("was not used" in note for note in with_them["notes"])


def test_what_stood_in_for_a_group_is_no_measurement_of_it() -> None:
    stored = ROOT / "results/stand-in-8-h200x2"
    said = "is of 2 GPUs that stood in for 8: no measurement of that many; give a run on a whole group"
    for read in (lambda: read_ops([*OPS, stored / "m8192"]), lambda: read_layers([*LAYERS, stored / "layer"])):
        with pytest.raises(UserError, match=said):
            read()


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "summary.json"
    broken.write_text("[]")
    with pytest.raises(UserError, match=r"cannot be read as a summary\.json of megatron-flux bench ops"):
        read_ops([broken])
    with pytest.raises(UserError, match="rows need model, seq"):
        read_layers([OPS[0]])
    with pytest.raises(UserError, match="No such file"):
        read_layers([tmp_path / "nothing"])
    summary = json.loads((LAYERS[0] / "summary.json").read_text())
    broken.write_text(json.dumps(summary | {"device": "Tesla T4"}))
    with pytest.raises(UserError, match="measured on Tesla T4, which is not in the table"):
        read_layers([broken])
    with pytest.raises(UserError, match="leaving one out needs at least two"):
        validate(Rates(device=H200), read_layers(LAYERS[:1]))
    broken.write_text(json.dumps(summary | {"rows": [r for r in summary["rows"] if r["arm"] != "busy_floor"]}))
    with pytest.raises(UserError, match="too few workloads with the arms floor, with its breakdown, and busy_floor"):
        validate(Rates(device=H200), read_layers([broken, LAYERS[1]]))


def test_layers_of_several_files_are_of_one_kind(tmp_path: Path) -> None:
    both = read_layers(LAYERS[:2])
    assert len(both.rows) == sum(len(read_layers([path]).rows) for path in LAYERS[:2])
    twice = "both have gpt3-175b 2048 x 1, whose arms count within one run; leave one out"
    for again in (MORE / "graphs-copies", LAYERS[2]):
        with pytest.raises(UserError, match=twice):
            read_layers([*LAYERS, again])
    other, summary = tmp_path / "summary.json", json.loads((LAYERS[1] / "summary.json").read_text())
    for change, told in (
        ({"tp": 2}, "h200 with tp 4 over nvlink, h200 with tp 2 over nvlink"),
        ({"device": "NVIDIA L20"}, "l20 with tp 4 over nvlink"),
        ({"link": "host"}, "h200 with tp 4 over host"),
    ):
        other.write_text(json.dumps(summary | change))
        with pytest.raises(UserError, match=f"different GPUs, tp or links: .*{told}; give files of one kind"):
            read_layers([LAYERS[0], other])
