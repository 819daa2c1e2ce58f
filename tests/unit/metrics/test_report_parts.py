"""What the chapters of a report say about runs of every kind, and about several of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.report import figures, write_reports
from megatron_flux.metrics.report.benchmarks import layers_chapter, operators_chapter
from megatron_flux.metrics.report.inference import inference_chapter
from megatron_flux.metrics.report.render import Chapter, Part, escaped
from megatron_flux.metrics.report.run import load, load_all, with_pairs
from megatron_flux.metrics.report.training import WAITS_INCLUDED, chapter
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.telemetry.call_sampler import FIELDS
from tests.unit.metrics.metrics_records import record, sampled_record
from tests.unit.metrics.report_runs import RESULTS, SHAPE, full_arms, full_run, one_arm


def parts(shown: Chapter) -> dict[str, Part]:
    found = {part.id: part for part in shown.parts}
    assert len(found) == len(shown.parts)
    for part in found.values():
        if part.figure is not None:
            go.Figure(part.figure)  # raises on a name or value that plotly does not know
        assert part.figure or part.table or part.caption, part.id
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Part]:
    return parts(chapter(load(full_run(tmp_path_factory.mktemp("full") / "run")), "run1"))


def test_everything_that_was_recorded_is_shown(full: dict[str, Part]) -> None:
    drawn = [name for name, part in full.items() if part.figure is not None]
    assert drawn == [
        *("step-times", "loss", "loss-difference", "grad-norm", "grad-norm-difference"),
        *("time", "e-overlap", "heat-baseline", "heat-flux", "spread", "sm-clock-mhz-min", "power-w-max"),
    ]
    assert "missing" not in full


def test_where_the_time_goes_adds_up(full: dict[str, Part]) -> None:
    part = full["time"]
    for index, arm in enumerate(reversed(["baseline", "flux"])):
        assert part.figure["data"][0]["y"][index] == arm
        stacked = sum(trace["x"][index] for trace in part.figure["data"])
        assert stacked == pytest.approx(100.0 if arm == "baseline" else 95.0)
    rows = {row[0]: row[1:] for row in part.table.rows}
    baseline = sum(float(cells[0]) for name, cells in rows.items() if name not in ("step", HIDDEN, WAITS_INCLUDED))
    assert baseline == pytest.approx(float(rows["step"][0]))
    assert rows["fused operators"] == ("0.00", "12.00")
    assert HIDDEN in rows


HIDDEN = "hidden communication (takes no time)"


def test_operators_are_medians_of_the_timed_samples(full: dict[str, Part]) -> None:
    part = full["e-overlap"]
    assert "5 timed sampled steps" in part.caption  # six, of which the first is a warm-up
    cells = {row[0]: row[1:] for row in part.table.rows}
    assert cells["all_gather_gemm 64 \u00d7 96 \u00d7 32, weight n \u00d7 k"] == (
        "64",
        "2",
        "1.6",
        "3.6",
        "0.4",
        "80 %",
    )
    assert full["choices"].table.rows[0][1:] == ("fused bm=128 bn=256", "2")


def test_calls_in_fp8_are_told_apart_by_their_formats(tmp_path: Path) -> None:
    """Both operands are always k-major: the weight's form does not tell forward's from dgrad's, of the same shape."""
    formats = ("e4m3fn x e4m3fn by tensor, to bfloat16", "e5m2 x e4m3fn by tensor, split, to bfloat16")
    arms = full_arms()
    for item in arms["flux"]:
        if item.get("flux/calls"):
            like = item["flux/calls"][0]
            item["flux/calls"] = [like | {"dtype": dtype, "transposed": False} for dtype in formats]
    part = parts(chapter(load(full_run(tmp_path / "run", arms)), "run1"))["e-overlap"]
    call = f"{like['operator']} " + " \u00d7 ".join(str(like[name]) for name in "mnk")
    assert [row[0] for row in part.table.rows] == [f"{call}, {dtype}" for dtype in formats]


def test_what_is_withheld_is_said(tmp_path: Path) -> None:
    arms = full_arms()
    for item in arms["flux"]:
        for call in item.get("flux/calls", [])[:1]:
            call |= {"exposed_ms": None, "e_overlap": None, "withheld": "the clocks were others"}
    part = parts(chapter(load(full_run(tmp_path / "run", arms)), "run1"))["e-overlap"]
    assert "5 of 10 sampled calls: the clocks were others" in part.caption
    assert [row[-2:] for row in part.table.rows] == [("\u2014", "\u2014"), ("0.5", "50 %")]


def test_efficiencies_of_earlier_versions_are_withheld(tmp_path: Path) -> None:
    arms = full_arms()
    for item in arms["flux"]:
        item["schema"] = 2
        for call in item.get("flux/calls", []):
            call |= {"source": "tuner", "exposed_ms": -1.0, "e_overlap": 3.2}
    part = parts(chapter(load(full_run(tmp_path / "run", arms)), "run1"))["e-overlap"]
    assert part.figure is None
    assert "10 of 10 sampled calls: an earlier version" in part.caption
    assert {row[-2:] for row in part.table.rows} == {("\u2014", "\u2014")}


def test_exposed_communication_says_that_it_leaves_out_what_fused_kernels_wait(full: dict[str, Part]) -> None:
    assert FUSED_WAITS in full["time"].caption
    rows = {row[0]: row[1:] for row in full["time"].table.rows}
    assert rows[WAITS_INCLUDED] == ("58.00", "53.00")
    assert "exposed communication ¹" in [trace["name"] for trace in full["time"].figure["data"]]


def test_operators_without_a_reference_say_why(tmp_path: Path) -> None:
    arms = full_arms()
    for item in arms["flux"]:
        for call in item.get("flux/calls", []):
            call |= {"gemm_ms": None, "serial_ms": None, "exposed_ms": None, "e_overlap": None, "source": "cuda graph"}
    shown = parts(chapter(load(full_run(tmp_path / "run", arms)), "run1"))
    assert shown["e-overlap"].figure is None
    assert "cuda graph" in shown["e-overlap"].caption


def test_what_cuda_graphs_hide_is_said(tmp_path: Path) -> None:
    arms = full_arms()
    counts = ("all_gather_gemm_calls", "gemm_reduce_scatter_calls", "gemm_all_reduce_calls", "bytes_received")
    counts += ("fallback_calls", "inputs_kept", "inputs_gathered_again")
    for item in arms["flux"]:
        item |= {f"flux/{name}": None for name in counts}
        if item.get("flux/sampled"):
            item |= dict.fromkeys((*FIELDS, "flux/slowest_rank", "flux/rank_spread_ms"))
    shown = parts(chapter(load(full_run(tmp_path / "run", arms)), "run1"))
    missing = dict(shown["missing"].table.rows)
    assert "CUDA graphs" in missing["Overlap efficiency per operator"]
    assert "CUDA graphs" in shown["operators"].caption
    assert [cell for _, cell in shown["operators"].table.rows[:7]] == ["\u2014"] * 7


def test_ranks_and_throttling(tmp_path: Path, full: dict[str, Part]) -> None:
    assert "Rank 1 on node1 was slowest in 5 of 5" in full["heat-flux"].caption
    assert [row[0] for row in full["ranks"].table.rows][2:] == ["flux, rank 0", "flux, rank 1"]
    assert full["throttling"].table.rows == [("sw_power_cap", "5 of 5", "5 of 5")]
    arms = full_arms()
    for item in arms["baseline"] + arms["flux"]:
        if "flux/gpu" in item:
            item["flux/gpu"] = None
            item["flux/throttle_reasons"] = None
        if "flux/run" in item:
            item["flux/run"]["gpu_source"] = "no NVML on this machine"
    missing = parts(chapter(load(full_run(tmp_path / "run", arms)), "run1"))["missing"].table.rows
    assert ("Clocks, power and throttling", "no NVML on this machine") in missing


def test_profiled_steps_are_not_timed(tmp_path: Path) -> None:
    arms = full_arms()
    for item in arms["flux"][5:9]:
        item |= {"profiled": True, "iteration-time": 50.0}
    run = load(full_run(tmp_path / "run", arms))
    assert run.summary["arms"]["flux"]["step_time_ms"]["p90"] < 100
    assert run.summary["arms"]["flux"]["step_time_ms"]["n"] == 13


def test_operator_benchmarks() -> None:
    (first, second) = load_all([RESULTS / "ops-h200x4-nvlink"])
    assert [run.name for run in (first, second)] == ["ops-h200x4-nvlink/m8192", "ops-h200x4-nvlink/smaller"]
    shown = parts(operators_chapter(first, "run1"))
    tuned = next(trace for trace in shown["e-all_gather_gemm"].figure["data"] if trace["name"] == "tuned")
    stored = {row["e_overlap"] for row in first.summary["rows"] if row["op"] == "all_gather_gemm"}
    assert {round(value / 100, 3) for value in tuned["x"]} == {round(value, 3) for value in stored}
    caption = parts(operators_chapter(second, "r"))["e-all_gather_gemm"].caption
    assert "1 point below \u2212100 % at the edge" in caption


def test_async_tp_by_itself_stands_beside_the_shared_one() -> None:
    run = load(RESULTS / "ops-h200x4-sustained" / "m2048")
    shared = "Async-TP ran with CUDA_DEVICE_MAX_CONNECTIONS 1"
    assert shared in parts(operators_chapter(run, "run1"))["ms-all_gather_gemm"].caption
    run.summary["async_tp_connections"] = "8"
    for row in run.summary["rows"]:
        row["async_tp_own"] = {"gemm_ms": 1.0, "serial_ms": 2.0, "async_tp_ms": 1.25}
    run.summary["rows"][0]["async_tp_own"] = None
    shown = parts(operators_chapter(run, "run1"))
    traces = {trace["name"]: trace for trace in shown["e-all_gather_gemm"].figure["data"]}
    assert set(traces["torch async-TP, 8 queues"]["x"]) == {75.0, None}
    table = shown["ms-all_gather_gemm"].table
    assert (table.head[-1], [row[-1] for row in table.rows][:2]) == ("async-TP, 8 queues", ["\u2014", "1.250"])
    assert "Async-TP with CUDA_DEVICE_MAX_CONNECTIONS 8" in shown["ms-all_gather_gemm"].caption


def test_benchmarks_say_what_stock_was_allowed_to_use() -> None:
    multicast = "NVLink multicast off (NCCL_NVLS_ENABLE 0)"
    operators = operators_chapter(load(RESULTS / "ops-h200x4-sustained" / "m2048"), "run1")
    assert operators.subtitle.endswith(f", {multicast}, CUDA_DEVICE_MAX_CONNECTIONS 1")
    layers = layers_chapter(load(RESULTS / "layer-h200x4-nvlink"), "run1")
    assert f"{multicast}, TE's userbuffers without it too (UB_SKIPMC 1), CUDA" in layers.subtitle
    assert FUSED_WAITS in parts(layers)["layers-1"].caption


def test_layer_benchmarks() -> None:
    run = load(RESULTS / "layer-h200x4-nvlink")
    shown = parts(layers_chapter(run, "run1"))
    assert [part.title for part in shown.values() if part.figure] == [
        "gpt3-175b, 2048 \u00d7 4: where the time goes",
        "gpt3-175b, 2048 \u00d7 1: where the time goes",
        "llama-70b, 4096 \u00d7 2: where the time goes",
    ]
    bars = {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in shown["time-1"].figure["data"]}
    assert sum(values["te"] for values in bars.values()) == pytest.approx(
        run.summary["rows"][0]["breakdown"]["span_ms"], 1e-3
    )
    assert bars["fused operators"]["te"] == 0


INFERENCE = [
    {"kind": kind, "model": "gpt3-175b", **what, "m": m, "arm": arm, "ms": ms, "ms_low": ms, "ms_high": 2 * ms,
     "speedup_vs_stock": 0.5 / ms, "ms_per_layer": ms}
    for kind, what, arms in (
        ("decode", {"layers": 1}, ("te", "flux_te", "floor")),
        ("gemm_all_reduce", {"layer": "fc2"}, ("stock", "flux")),
    )
    for m in (1, 8)
    for arm, ms in zip(arms, (0.5, 0.4, 0.25), strict=False)
]  # fmt: skip


@pytest.mark.parametrize("note", [None, "no measure of speed"])
def test_inference_benchmarks(tmp_path: Path, note: str | None) -> None:
    skipped = [{"kind": "decode", "model": "gpt3-175b", "arm": "local", "reason": "it <fell> over"}] * 2
    summary = {"device": "H200", "tp": 2, "link": "nvlink", "note": note, "rows": INFERENCE, "skipped": skipped}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = load(tmp_path)
    assert (run.kind, run.verdict) == ("inference", "10 inference timings, H200, tp 2")
    shown = parts(inference_chapter(run, "run1"))
    figures = [name for name, part in shown.items() if part.figure]
    assert figures == ([] if note else ["speed-up-decode", "speed-up-gemm_all_reduce"])
    table = shown["ms-decode"].table
    assert table.rows[1][:3] == ("gpt3-175b, 1 layer(s), m 1", "flux_te", "0.4000 (0.4000\u20260.8000)")
    assert shown["skipped"].table.rows == [("decode gpt3-175b local", "it <fell> over")]
    if note:
        assert len(table.head) == len(table.rows[0]) == 3
        assert shown["ms-decode"].caption.startswith(note)
    else:
        assert table.rows[1][3] == "1.250\u00d7"
        traces = {trace["name"]: trace for trace in shown["speed-up-decode"].figure["data"]}
        assert traces.keys() == {"te", "flux_te", "floor"}
        assert traces["floor"]["x"] == [2.0, 2.0]
    page, _ = write_reports([tmp_path], tmp_path / "out")
    assert "it &lt;fell&gt; over" in page.read_text()


def test_damaged_inference_benchmarks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"rows": [{**INFERENCE[0], "ms": "fast"}]}))
    with pytest.raises(UserError, match="row 1 has no usable 'ms'"):
        load(tmp_path)


def test_several_runs(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / "first"), full_run(tmp_path / "second", shape={"hidden_size": 128}, lr=1.0)]
    page, text = write_reports([*runs, RESULTS / "layer-h200x4-nvlink"], tmp_path / "out")
    assert page.name == "report.html"
    said = text.read_text()
    assert said.startswith("# 2 training runs, 1 layer benchmark\n")
    assert "first and second trained different models (num\\_layers 2 and \u2014, hidden\\_size 64 and 128" in said
    assert "| lr | 0.001 | 1.0 |" in said
    assert "| torch |" not in said
    html = page.read_text()
    assert html.count("* plotly.js v") == 1
    assert '<a href="#run3">layer-h200x4-nvlink</a>' in html
    assert 'id="run3"' in html


def test_two_runs_of_one_arm_each_are_compared(tmp_path: Path) -> None:
    runs = [load(one_arm(tmp_path / "flux-job", "flux")), load(one_arm(tmp_path / "stock-job", "baseline"))]
    assert runs[0].verdict == "flux alone: 90.17 ms per step (median of 17)"
    joined = with_pairs(runs)
    assert joined[0].name == "stock-job and flux-job"
    assert joined[0].verdict == "flux 1.11x, no interval: 1 pair of blocks, 6 are needed"
    assert "two separate runs" in joined[0].summary["notes"][-1]
    blocks = [{item["block"] for item in joined[0].arms[arm]} for arm in ("baseline", "flux")]
    assert blocks == [{0}, {1}]
    assert runs[0].arms["flux"][0]["block"] == 0


def test_one_arm_of_another_model_is_not_compared(tmp_path: Path) -> None:
    one_arm(tmp_path / "flux-job", "flux", shape={**SHAPE, "num_layers": 3})
    one_arm(tmp_path / "stock-job", "baseline")
    _, text = write_reports([tmp_path / "stock-job", tmp_path / "flux-job"], tmp_path / "out")
    said = text.read_text()
    assert "trained different models (num\\_layers 2 and 3): do not compare" in said
    assert "stock-job and flux-job:" not in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"global_batch_size": 8}, "global_batch_size 4 and 8"),
        ({"tp": 4}, "tp 2 and 4"),
        ({"precision": "fp32"}, "precision bf16 and fp32"),
    ],
)
def test_one_arm_of_other_steps_is_not_compared(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    """A step of twice the batch takes twice as long: their ratio is no speed-up."""
    stock = load(one_arm(tmp_path / "stock-job", "baseline"))
    runs = [stock, load(one_arm(tmp_path / "flux-job", "flux", **settings))]
    assert with_pairs(runs) == runs
    _, text = write_reports([run.path for run in runs], tmp_path / "out")
    written = text.read_text().replace("\\", "")
    assert f"stock-job and flux-job trained in different ways ({said}): do not compare them" in written


def test_one_arm_of_another_device_is_not_compared(tmp_path: Path) -> None:
    runs = [load(one_arm(tmp_path / f"{arm}-job", arm)) for arm in ("baseline", "flux")]
    runs[1].summary["device"] = {**runs[1].summary["device"], "name": "NVIDIA A100"}
    assert with_pairs(runs) == runs


def test_losses_of_other_trainings_are_not_compared(tmp_path: Path) -> None:
    runs = [load(one_arm(tmp_path / "flux-job", "flux", seed=1)), load(one_arm(tmp_path / "stock-job", "baseline"))]
    assert with_pairs(runs)[0].summary["notes"][-1] == "The arms' losses cannot be compared: seed 1234 and 1."


def test_markdown_shows_text_as_it_is() -> None:
    hostile = "<img src=x>|`a`*b*\n# [x](y)"
    shown = escaped(hostile)
    assert "\n" not in shown
    assert shown == "\\<img src=x\\>\\|\\`a\\`\\*b\\*\\ \\# \\[x\\](y)".replace("\\ ", " ")


@pytest.mark.parametrize(
    ("make", "said"), [("file", "no folder"), ("missing", "missing"), ("empty", "not a run folder")]
)
def test_what_is_no_run(tmp_path: Path, make: str, said: str) -> None:
    path = tmp_path / "x"
    if make == "file":
        path.write_text("")
    elif make == "empty":
        path.mkdir()
    with pytest.raises(UserError, match=said) as caught:
        write_reports([path], tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_schema_to_come_is_said(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    with (run / "flux" / "metrics.jsonl").open("a") as file:
        file.write(str(sampled_record(99, flux=True, schema=99)).replace("'", '"').replace("None", "null") + "\n")
    assert "line 19 is damaged and left out" in load(run).problems[0]


def test_long_runs_are_thinned_without_losing_peaks() -> None:
    steps = 5 * figures.MAX_POINTS
    arms = {arm: [record(n, block=n // 50) for n in range(1, steps + 1)] for arm in ("baseline", "flux")}
    arms["flux"][4321] |= {"lm loss": 9e9, "iteration-time": 0.12}
    for drawn, caption in (
        figures.step_times(arms),
        figures.curves(arms, "lm loss", ""),
        figures.difference(arms, "lm loss"),
    ):
        assert all(len(trace["x"]) <= figures.MAX_POINTS + 1 for trace in drawn["data"])
        assert "Of every 10 steps" in caption
        peak = max(value for trace in drawn["data"] for value in trace["y"])
        assert peak in (9e9, 120.0) or peak > 1e5
        assert all(sorted(trace["x"]) == trace["x"] for trace in drawn["data"])


def test_validation_losses_are_points_on_the_loss() -> None:
    arms = {"baseline": [record(n) for n in range(1, 5)], "flux": []}
    arms["baseline"][2]["lm loss validation"] = 4.5
    drawn, _ = figures.curves(arms, "lm loss", "nat/token", "lm loss validation")
    line, points = drawn["data"]
    assert (points["name"], points["mode"]) == ("baseline, lm loss validation", "markers")
    assert (points["x"], points["y"]) == ([3], [4.5])
    assert len(line["x"]) == 4
