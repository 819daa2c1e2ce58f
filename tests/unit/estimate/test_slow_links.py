"""Predictions for links without NVLink: against what was measured, and what must hold whatever the figures are."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.bench.layer_config import LAYER_MODELS
from megatron_flux.bench.shapes import Case, layer_cases
from megatron_flux.errors import UserError
from megatron_flux.estimate import slow_links
from megatron_flux.estimate.job import PlanOptions, resolve
from megatron_flux.estimate.layout import linears
from megatron_flux.estimate.measured import validate
from megatron_flux.estimate.prediction import predict_options
from megatron_flux.estimate.rates import DEVICES, Rates, read_layers, read_ops
from megatron_flux.estimate.step import column_backward, flux_workspace, predict_layer

ROOT = Path(__file__).parents[3]
H200 = DEVICES["h200"]
AG, RS = "all_gather_gemm", "gemm_reduce_scatter"
X = "\N{MULTIPLICATION SIGN}"

MEASURED = [ROOT / "results/host-link-h200x2" / name for name in ("layer-2048x16", "layer-2048x4")]
# Noted of four H200s that did not use NVLink: milliseconds of stock's layer with TransformerEngine; no raw rounds.
NOTED = [("gpt3-175b", 2048, 4, 81.5), ("llama-70b", 4096, 2, 50.1)]
# Collectives of bf16 [8192, hidden], milliseconds, all-gathers and reduce-scatters: by NCCL, and flux's transfers
# alone: of results/host-link-h200x2, one lane, slots of 4 MB; with four GPUs noted, of prototypes with slots of 2 MB.
COLLECTIVES = [
    ("NCCL", 4096, 2, (1.35, 1.34, 1.35, 1.35)),
    ("NCCL", 12288, 2, (4.04, 4.03, 4.07, 4.02)),
    ("NCCL", 12288, 4, (5.9, 6.35)),
    ("chunks", 12288, 2, (2.49, 2.51)),
    ("chunks", 12288, 4, (4.6, 5.2)),
]
# Calls: operator, tp, local n and k, wire, milliseconds of the GEMM and of the transfer, and of the chunked call. With
# four GPUs prototypes, of which the scatter of bf16 waited for its host.
CALLS = [
    (AG, 2, 24576, 12288, "exact", 6.4, 2.84, 6.75, 0.033),
    (AG, 4, 12288, 12288, "exact", 3.1, 4.6, 5.35, 0.033),
    (AG, 4, 12288, 12288, "fp8", 3.1, 2.3, 3.55, 0.033),
    (RS, 4, 12288, 12288, "exact", 3.5, 5.2, 6.8, 0.2),
    (RS, 4, 12288, 12288, "fp8", 3.5, 3.5, 4.0, 0.033),
]


def rates(gpus: int, **changes: Any) -> Rates:
    return Rates(device=H200, kind="host", gpus=gpus, **changes)


def plan(**options: Any) -> dict[str, Any]:
    return predict_options(PlanOptions(**{"host_ms_per_layer": 0.0, **options}))


# --- against what was measured


def test_layers_are_within_what_is_said_of_them() -> None:
    text = (ROOT / "slurm/PLAN.md").read_text()
    section = text.split("### Through host memory")[1].split("\n### ")[0]
    errors: dict[str, list[float]] = {"baseline": [], "flux": [], "floor": []}
    rows = [row for path in MEASURED for row in validate(Rates(device=H200), read_layers([path]))["rows"]]
    assert len(rows) == 12
    for model, seq, micro, ms in NOTED:
        predicted = predict_layer(rates(4), "baseline", LAYER_MODELS[model], seq, micro, 4).total
        row = {"model": model, "seq": seq, "micro_batch": micro, "arm": "te", "measured_ms": ms}
        rows.append(row | {"predicted_ms": predicted, "error": predicted / ms - 1})
    for row in rows:
        line = f"| {row['model']}, {row['seq']} {X} {row['micro_batch']} | {row['arm']} | {row['measured_ms']:.2f} | "
        assert f"{line}{row['predicted_ms']:.2f} | {row['error']:+.1%} |" in section
        kind = "floor" if row["arm"] == "floor" else "flux" if "flux" in row["arm"] else "baseline"
        errors[kind].append(abs(row["error"]))
    assert {kind: round(max(errors[kind]), 3) for kind in ("baseline", "flux")} == slow_links.LARGEST_ERRORS
    assert max(errors["floor"]) < 0.08
    stock, flux = (100 * slow_links.LARGEST_ERRORS[kind] for kind in ("baseline", "flux"))
    said = f"are off by {stock:.1f} % at most of stock and {flux:.1f} % of flux;"
    assert said in " ".join((ROOT / "docs/slurm.md").read_text().split())


@pytest.mark.parametrize(("what", "hidden", "tp", "measured"), COLLECTIVES)
def test_collectives_through_host_memory(what: str, hidden: int, tp: int, measured: tuple[float, float]) -> None:
    nbytes, own = 2 * (tp - 1) * 8192 // tp * hidden, rates(tp)
    predicted = own.collective(nbytes, tp) if what == "NCCL" else own.transfer(nbytes, tp)
    for ms in measured:
        assert predicted == pytest.approx(ms, rel=0.1), (what, hidden, tp)


@pytest.mark.parametrize(("op", "tp", "n", "k", "wire", "gemm", "link", "measured", "off"), CALLS)
def test_chunked_calls_of_a_measured_gemm_and_transfer(
    op: str, tp: int, n: int, k: int, wire: str, gemm: float, link: float, measured: float, off: float
) -> None:
    case, own = Case(op, "", "", "forward", 8192, n, k), rates(tp, wire=wire)
    block = case.bytes_received(tp) / (tp - 1)
    adding = own.memory((tp + 1) * block) if op == RS else 0.0
    predicted = slow_links.chunked(case, tp, gemm, link, own.coding(tp * block / 2), adding)
    assert abs(predicted / measured - 1) < off, predicted


def test_the_rates_of_eight_gpus_and_of_more() -> None:
    assert rates(8).nccl == pytest.approx(2 * 7 / 8 * 8192 * 12288 / 19.4e6, rel=0.02)  # 19.4 ms were measured
    assert rates(16).nccl == pytest.approx(4.5)
    assert rates(8).chunks == pytest.approx(7.3 * 37.5 / 24 * 31 / 37.5, rel=0.01)
    assert rates(16).chunks == pytest.approx(rates(8).chunks / 2)


# --- what must hold


def test_slower_pcie_is_slower_and_host_memory_is_shared() -> None:
    generations = [replace(rates(2), link_gb_per_s=slow_links.PCIE[g]) for g in (5, 4, 3)]
    for faster, slower in itertools.pairwise(generations):
        assert slower.nccl < faster.nccl
        assert slower.chunks < faster.chunks
    assert generations[1].chunks == pytest.approx(0.72 * 32)
    assert [rates(gpus).chunks for gpus in (1, 2, 4, 8)] == sorted(
        (rates(g).chunks for g in (1, 2, 4, 8)), reverse=True
    )
    # One host's memory is no limit where PCIe is slow.
    assert replace(rates(2), link_gb_per_s=16.0).chunks == replace(rates(4), link_gb_per_s=16.0).chunks


@pytest.mark.parametrize("device", list(DEVICES))
@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_chunked_calls_are_within_their_bounds(device: str, wire: str) -> None:
    for tp in (2, 4, 8):
        own = Rates(device=DEVICES[device], kind="host", gpus=8, wire=wire)
        for model in ("gpt3-175b", "gpt3-6.7b"):
            for case in layer_cases(model, LAYER_MODELS[model], 8192, "forward", tp):
                pair = own.pair(case, tp)
                assert pair.gemm <= pair.fused <= pair.serial
                assert pair.link <= pair.fused or pair.fused == pair.serial
            shape = LAYER_MODELS[model]
            stock, flux = (predict_layer(own, arm, shape, 2048, 4, tp) for arm in ("baseline", "flux"))
            assert flux.both.compute == stock.both.compute < flux.total < stock.total


def test_a_gpu_that_waits_has_power_to_spare() -> None:
    shape = LAYER_MODELS["gpt3-175b"]
    over = {arm: predict_layer(rates(4), arm, shape, 2048, 4, 4) for arm in ("baseline", "flux")}
    busy = predict_layer(Rates(device=H200), "baseline", shape, 2048, 4, 4)
    for layer in over.values():  # what a layer takes without communication does not depend on it
        assert layer.both.compute == pytest.approx(busy.both.compute)
    assert rates(4, clock=1.11).gemm(8192, 8192, 8192) == pytest.approx(rates(4).gemm(8192, 8192, 8192) / 1.11)
    quick = rates(4, clock=slow_links.SPARED)
    # results/host-link-h200x2/one-lane: FC1 of 175B in 6.42 ms, of 6.7B in 0.71.
    for n, k, ms in ((24576, 12288, 6.42), (8192, 4096, 0.71)):
        assert quick.gemm(8192, n, k) == pytest.approx(ms, rel=0.02)


def test_eight_bits_travel_as_half_and_a_thirty_second() -> None:
    assert slow_links.on_wire(2.0 * 1000, "exact") == 2000
    for wire in ("fp8", "int8"):
        assert slow_links.on_wire(2.0 * 1000, wire) == 1000 * (1 + 1 / 32)
    exact, fp8 = (rates(4, wire=wire).transfer(1e8, 4) for wire in ("exact", "fp8"))
    assert fp8 / exact == pytest.approx(33 / 64)


def test_what_is_kept_is_not_transferred_again() -> None:
    shape = LAYER_MODELS["gpt3-175b"]
    # A link so slow that it alone counts: eight transfers of ten.
    slow = replace(rates(4), link_gb_per_s=1e-3)
    gathered, kept = (
        predict_layer(replace(slow, keep_gathered=keep), "flux", shape, 2048, 4, 4).total for keep in (False, True)
    )
    assert kept / gathered == pytest.approx(0.8, rel=1e-3)
    stock = [predict_layer(replace(slow, keep_gathered=k), "baseline", shape, 2048, 4, 4).total for k in (False, True)]
    assert stock[0] == stock[1]


def test_a_reduce_scatter_goes_on_beside_wgrad() -> None:
    own, shape = rates(4, keep_gathered=True), LAYER_MODELS["llama-70b"]
    (fc1,) = (case for case in layer_cases("", shape, 8192, "dgrad", 4) if case.layer == "fc1")
    pair, wgrad = own.pair(fc1, 4), own.gemm(fc1.k, fc1.n, 8192)
    assert pair.gemm < pair.link < pair.gemm + wgrad
    phase = column_backward(own, "flux", 8192, fc1.k, fc1.n, 4, pair)
    assert phase.total == pytest.approx(pair.gemm + wgrad + pair.fused - pair.link)
    gathered = column_backward(replace(own, keep_gathered=False), "flux", 8192, fc1.k, fc1.n, 4, pair, before=0.5)
    late = own.transfer(2 * 3 * 2048 * fc1.n, 4) - 0.5
    assert gathered.total == pytest.approx(late + pair.fused)


# --- plans


def test_a_plan_over_host_memory_says_what_it_is_from(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(device="h200", gpus=4, gpus_per_node=4, tp=4, pp=1, num_layers=4, link="host")
    assert found["flux_runs_stock"] is None
    assert found["speedup"] > 1.2
    slow = plan(device="h200", gpus=4, gpus_per_node=4, tp=4, pp=1, num_layers=4, link="host", host_ms_per_layer=40.0)
    hosts = [slow["arms"][arm]["step"]["host"] for arm in ("baseline", "flux")]
    assert hosts[0] == 0 < hosts[1], "a layer of stock's takes twice as long"
    layers = 4 * slow["job"]["micro_batches"]
    step = slow["arms"]["flux"]["step"]
    assert step["pipeline"] == pytest.approx(layers * 2.0 * 40.0 + step["vocabulary"])
    assert (found["sensitivity"], found["inputs"]["overlap_efficiency"]) == ([], None)
    assert found["inputs"]["nccl_reaches_gb_per_s"] == pytest.approx(24.96)
    rows = {(row["bits"], row["keep_gathered"]): row for row in found["choices"]}
    assert rows[16, False]["flux_ms"] == pytest.approx(found["arms"]["flux"]["step"]["total"])
    assert rows[8, False]["speedup"] > rows[16, True]["speedup"] > rows[16, False]["speedup"]
    kept = 4 * 2 * 2 * 8192 * 12288 / 1e9  # layers, inputs, bytes
    assert rows[16, True]["memory_gb"] - rows[16, False]["memory_gb"] == pytest.approx(kept)
    workspace = found["arms"]["flux"]["memory"]["flux_workspace"] * 1e9
    assert workspace == 4 * 8192 * 12288 < flux_workspace(8192, 12288)
    (note,) = (note for note in found["notes"] if "keeps gathered inputs" in note)
    left = (141 - found["arms"]["baseline"]["memory"]["total"] - 6) / 4
    assert f"in a quarter of what a step leaves (here {left:.1f} GB) or in --keep-gathered-bytes" in note
    (note,) = (note for note in found["notes"] if "measured on H200s that did not use NVLink" in note)
    assert note.endswith("stock's are off by up to 3.5%, flux's by up to 8.1%")
    other = plan(device="l40s", gpus=128, preset="llama2-70b", link="host", wire="fp8")
    assert any("taken for 8 x l40s: measure with doctor --links" in note for note in other["notes"])
    assert not any("where predictions could be checked" in note for note in other["notes"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"link": "p2p"}, "no NVLink between the GPUs of a node"),
        ({"link": "none"}, "no NVLink between the GPUs of a node"),
        ({"link": "host", "tp": 16}, "spans nodes of 8"),
        ({"link": "host", "tp": 1, "pp": 16}, "tp = 1"),
    ],
)
def test_over_other_links_flux_runs_stock(options: dict[str, Any], reason: str) -> None:
    found = plan(device="h200", **options)
    assert reason in found["flux_runs_stock"]
    assert (found["speedup"], found["choices"]) == (1, [])


def test_weaker_links_cost_stock_time() -> None:
    times = [plan(device="h200", link=link)["arms"]["baseline"]["step"]["total"] for link in ("nvlink", "p2p", "host")]
    assert times == sorted(times)
    spanning = [plan(device="h200", tp=16, link=link)["arms"]["baseline"] for link in ("nvlink", "host")]
    assert spanning[0] == spanning[1], "the network is the limit"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "l40s", "link": "nvlink"}, "--link nvlink is more than l40s has; use one of: none, host, p2p"),
        ({"wire": "fp8"}, "--wire fp8 is planned for the link host, this one is nvlink; leave it out, or give --link"),
        ({"link": "p2p", "keep_gathered": True}, "--keep-gathered is planned for the link host, this one is p2p"),
        ({"device": "a100-pcie", "link": "host", "wire": "fp8"}, "--wire fp8 needs compute capability 8.9, a100-pcie"),
        ({"grad_wire": "int8"}, "--grad-wire int8 is planned for the link host, this one is nvlink"),
        (
            {"device": "a100-pcie", "link": "host", "grad_wire": "fp8"},
            "--grad-wire fp8 needs compute capability 8.9, a100-pcie has .*; use --grad-wire int8",
        ),
        ({"link": "host", "overlap_efficiency": 0.5}, "--overlap-efficiency is of fused kernels"),
    ],
)
def test_what_a_link_does_not_have_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        plan(**options)
    assert "\n" not in str(error.value)


def test_the_layout_over_host_memory_is_chunked() -> None:
    job = resolve(PlanOptions(device="h200", link="host", wire="int8"))
    assert {call["kernel"] for call in linears(job)} == {"chunked"}
    assert {call["plan"] for call in linears(job)} == {"2 piece(s) a shard, wire int8"}
    job = resolve(PlanOptions(device="h200", link="host", wire="int8", grad_wire="exact"))
    wires = {(call["direction"], call["plan"].rpartition(" ")[2]) for call in linears(job)}
    assert wires == {("forward", "int8"), ("dgrad", "exact")}


# --- from measured files


def host_ops(folder: Path, **changes: Any) -> Path:
    """A summary of ``bench ops --link host --wire fp8``."""
    summary = json.loads((ROOT / "results/ops-h200x4-sustained/m8192/summary.json").read_text())
    rows = summary["rows"]
    for row in rows:
        row |= {"nccl_ms": 6.0, "serial_ms": row["gemm_ms"] + 6.1, "chunked_ms": row["gemm_ms"] + 2.0}
        row |= {"chunked_fp8_ms": row["gemm_ms"] + 1.0, "tuned_ms": row["gemm_ms"] + 1.0}
    (folder / "summary.json").write_text(json.dumps(summary | {"link": "host", "link_gb_per_s": 31.0} | changes))
    return folder


def test_measured_calls_are_those_of_the_wire_that_is_planned(tmp_path: Path) -> None:
    calls = read_ops([host_ops(tmp_path)])
    assert (calls.link, calls.gb_per_s) == ("host", 31.0)
    call = calls.calls[0]
    for wire, more in (("exact", 2.0), ("fp8", 1.0)):
        own = rates(4, calls=calls, wire=wire)
        assert own.pair(call.case, 4).fused == pytest.approx(call.gemm_ms + more)
        assert own.chunks == 31.0
    int8 = rates(4, calls=calls, wire="int8").pair(call.case, 4)  # not measured
    assert int8.gemm == call.gemm_ms
    assert int8.fused > int8.gemm + int8.link / 10
    found = plan(ops=[tmp_path], gpus=4, gpus_per_node=4, tp=4, pp=1, num_layers=4)
    assert found["job"]["link"] == "host"
    assert "predicted from calls measured over host" in found["notes"][-1]


def test_files_over_another_link_are_refused(tmp_path: Path) -> None:
    ops = host_ops(tmp_path)
    with pytest.raises(UserError, match="--ops was measured over host, the job's link is nvlink; leave out --link or"):
        plan(ops=[ops], link="nvlink")
    with pytest.raises(UserError, match="--ops are over different links: host, nvlink"):
        read_ops([ops, ROOT / "results/ops-h200x4-sustained/m2048"])
    layers = ROOT / "results/layer-h200x4-ahead/sustained/gpt3"
    with pytest.raises(UserError, match="--layers was measured over nvlink, the job's link is host"):
        plan(layers=[layers], link="host")
    with pytest.raises(UserError, match="measured over nvlink, the operators over host"):
        validate(Rates(device=H200, calls=read_ops([ops])), read_layers([layers]))


def test_layers_over_host_memory_are_validated_by_arm_and_wire(tmp_path: Path) -> None:
    summary = json.loads((ROOT / "results/layer-h200x4-ahead/sustained/gpt3/summary.json").read_text())
    arms = {"te": 81.5, "flux_te": 58.0, "flux_te_fp8wire": 44.0, "floor": 35.0}
    (like,) = (r for r in summary["rows"] if r["arm"] == "te" and r["micro_batch"] == 4)
    rows = [like | {"arm": arm, "ms_per_layer": ms} for arm, ms in arms.items()]
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"link": "host", "rows": rows}))
    layers = read_layers([tmp_path])
    assert "over NVLink" in validate(Rates(device=H200), layers)["constants"]
    found = {row["arm"]: row for row in validate(Rates(device=H200), layers)["rows"]}
    assert found.keys() == arms.keys()
    for arm, wire in (("flux_te", "exact"), ("flux_te_fp8wire", "fp8")):
        shape = LAYER_MODELS["gpt3-175b"]
        assert found[arm]["predicted_ms"] == predict_layer(rates(4, wire=wire), "flux", shape, 2048, 4, 4).total
        assert layers.ms("flux", shape, 2048, 4, 4, wire=wire) == arms[arm]
    assert layers.ms("baseline", shape, 2048, 4, 4, wire="fp8") == 81.5
    assert layers.ms("flux", shape, 2048, 4, 4, wire="fp8", grad_wire="exact") is None


def test_gradients_on_a_wire_of_their_own() -> None:
    """What gradients' wire saves is saved in backward, and the rest in what is of activations."""
    shape, wires = LAYER_MODELS["gpt3-175b"], [(a, b) for a in ("exact", "fp8") for b in ("exact", "fp8")]
    found = {(a, b): predict_layer(rates(4, wire=a, grad_wire=b), "flux", shape, 2048, 4, 4) for a, b in wires}
    assert found["exact", "exact"] == predict_layer(rates(4), "flux", shape, 2048, 4, 4)
    assert found["fp8", "fp8"] == predict_layer(rates(4, wire="fp8"), "flux", shape, 2048, 4, 4)
    own = found["exact", "fp8"]
    assert found["fp8", "fp8"].total < own.total < found["exact", "exact"].total
    assert found["fp8", "exact"].forward.total < own.forward.total
    assert own.backward.total < found["exact", "exact"].backward.total
    exact, mixed = (rates(4, grad_wire=wire, host_ms_per_layer=4.0) for wire in ("exact", "fp8"))
    assert mixed.host_ms("flux") > exact.host_ms("flux")
    said = {kind: plan(device="h200", link="host", gpus=8, pp=1, tp=8, grad_wire=kind) for kind in ("exact", "fp8")}
    assert said["fp8"]["job"]["grad_wire"] == "fp8"
    assert said["fp8"]["speedup"] > said["exact"]["speedup"]
