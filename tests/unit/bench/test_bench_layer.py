"""``bench layer`` without processes: what is asked for, rows, tables, the picture, the command."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_flux.bench import layer_arms, report
from megatron_flux.bench.layer_arms import prepare_gradients, share, shared_name
from megatron_flux.bench.layer_config import ARMS, LayerOptions, Workload, resolve
from megatron_flux.bench.layer_workload import complete, row
from megatron_flux.cli.main import app
from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.ops.timing import quartiles
from megatron_flux.run import rank

STAND_IN = Path(__file__).parents[3] / "results" / "stand-in-8-h200x2"
GPT = Workload(model="gpt3-175b", seq=2048, micro_batch=4, layers=4)


def test_defaults_are_the_documented_workloads() -> None:
    config = resolve(LayerOptions(), 8)
    assert [(w.label, w.layers) for w in config.workloads] == [
        ("gpt3-175b-2048x4", 4), ("gpt3-175b-2048x1", 4), ("llama-70b-4096x2", 4), ("llama-405b-8192x1", 2),
    ]  # fmt: skip
    assert config.arms == ARMS
    assert (config.tp, config.device) == (8, "cuda")
    assert config.tp == 8


def test_tables_say_what_stock_was_allowed_to_use() -> None:
    found = json.loads((STAND_IN.parent / "layer-h200x4-ahead" / "bursts" / "gpt3" / "summary.json").read_text())
    text = io.StringIO()
    report.show_layers(found, text)
    said = "NVLink multicast off (NCCL_NVLS_ENABLE 0), TE's userbuffers without it too (UB_SKIPMC 1)"
    assert said in text.getvalue()
    assert FUSED_WAITS in " ".join(text.getvalue().split())
    found["environment"]["NCCL_NVLS_ENABLE"] = None
    report.show_layers(found, text)
    assert "NVLink multicast left to NCCL (NCCL_NVLS_ENABLE not set)" in text.getvalue()


def test_the_users_switches_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in rank.MEASURED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    rank.set_environment()
    found = {name: os.environ[name] for name in rank.MEASURED}
    assert found == {**rank.MEASURED, "NCCL_NVLS_ENABLE": "1"}
    assert found["UB_SKIPMC"] == found["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_overrides_and_order() -> None:
    config = resolve(LayerOptions(models="tiny, gpt3-175b", micro_batch=2, layers=3, arms="floor,te,floor"), 4)
    assert [(w.label, w.layers) for w in config.workloads] == [("tiny-256x2", 3), ("gpt3-175b-2048x2", 3)]
    assert config.arms == ("floor", "te")


@pytest.mark.parametrize(
    ("options", "tp", "said"),
    [
        ({"models": "gpt4"}, 8, "unknown model 'gpt4'; use one or more of: gpt3-175b"),
        ({"models": " ,"}, 8, "--models .* names nothing; use one or more of: gpt3"),
        ({"arms": "te,flux"}, 8, "unknown arm 'flux'; use one or more of: te, local, te_ub"),
        ({"backend": "floor7"}, 8, "unknown backend 'floor7'"),
        ({"models": "llama-70b"}, 16, "llama-70b-4096x2: 8 key/value heads cannot be divided among 16 GPUs"),
        (
            {"models": "gpt3-175b", "seq": 100},
            8,
            "gpt3-175b-100x4: 100 tokens a sequence cannot",
        ),
        ({}, 1, "needs tensor parallelism"),
        ({"arms": "te,busy_floor", "cuda_graphs": True}, 8, "cannot run the arm busy_floor"),
        ({"link": "none", "cuda_graphs": True}, 8, "--cuda-graphs cannot capture what goes over the link none"),
        ({"link": "p2p", "cuda_graphs": True}, 8, "--cuda-graphs cannot capture what goes over the link p2p"),
        ({"fp8": "delayed,mxfp8"}, 8, "unknown FP8 recipe 'mxfp8'; use one or more of: delayed, current, blockwise"),
        ({"fp8": " "}, 8, "--fp8 ' ' names nothing; use one or more of: delayed, current, blockwise"),
        ({"fp8": "delayed", "cuda_graphs": True}, 8, "--cuda-graphs cannot capture flux's FP8 layers"),
        ({"bf16": False}, 8, "--no-bf16 leaves nothing to measure; give --fp8"),
        ({"arms": "flux_te_fp8wire"}, 8, "unknown arm 'flux_te_fp8wire'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], tp: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(LayerOptions(**options), tp)


def test_memory_is_that_of_one_set_of_weights() -> None:
    # 12 h^2 weights per GPT layer.
    assert GPT.shape.layer_weights == 12 * 12288**2
    one, two, three = (GPT.memory_gb(8, blocks) for blocks in (1, 2, 3))
    weights = 4 * GPT.shape.layer_weights / 8 / 1e9
    assert two == three == pytest.approx(one + 2 * weights)
    assert 6 * weights < one < 9 * weights


def test_recipes_are_workloads_behind_bf16() -> None:
    config = resolve(LayerOptions(models="llama-70b", fp8="blockwise,delayed"), 8)
    assert [w.fp8 for w in config.workloads] == [None, "blockwise", "delayed"]
    assert [w.label for w in config.workloads] == [
        "llama-70b-4096x2", "llama-70b-4096x2-blockwise", "llama-70b-4096x2-delayed",
    ]  # fmt: skip
    assert [w.fp8 for w in resolve(LayerOptions(models="tiny", fp8="current", bf16=False), 2).workloads] == ["current"]
    plain, fp8 = config.workloads[:2]
    copies = 4 * plain.shape.layer_weights / 8 / 1e9 * 2 * 3  # the weight and its transpose, in each of three blocks
    assert fp8.memory_gb(8, 3) == pytest.approx(plain.memory_gb(8, 3) + copies)


def test_layers_of_arms_in_fp8() -> None:
    arms = ("te", "te_ub", "flux_te", "floor", "busy_floor")
    assert [layer_arms.block_of(arm, "current") for arm in arms] == ["te", "te_ub", "te", "te_floor", "te_floor"]
    assert [layer_arms.block_of(arm) for arm in arms] == ["te", "te_ub", "te", "local", "local"]


def test_arms_that_fp8_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_arms.importlib.util, "find_spec", lambda name: name)
    gpu = torch.device("cuda", 0)
    for arm in ("te", "te_ub", "flux_te", "flux_te_own_gather", "floor", "busy_floor"):
        assert layer_arms.why_not(arm, gpu, "nvlink", "current") is None
    blocks = "TransformerEngine's userbuffers take no FP8 in blocks"
    assert layer_arms.why_not("te_ub", gpu, "nvlink", "blockwise") == blocks
    assert layer_arms.why_not("te_ub", gpu, "nvlink", "delayed") is None
    for arm in ("local", "flux_local"):
        assert layer_arms.why_not(arm, gpu, "nvlink", "delayed") == "megatron-core's own linears have no FP8"
    wire = "in FP8 the bytes themselves are sent"
    assert layer_arms.why_not("flux_te_int8wire", gpu, "host", "delayed") == wire
    assert layer_arms.why_not("floor", torch.device("cpu"), "none", "delayed") == "TransformerEngine needs a GPU"


def test_te_names_of_norms_are_mapped() -> None:
    assert shared_name("layers.0.self_attention.linear_qkv.layer_norm_weight") == "layers.0.input_layernorm.weight"
    assert shared_name("layers.1.mlp.linear_fc1.layer_norm_bias") == "layers.1.pre_mlp_layernorm.bias"
    assert shared_name("layers.1.mlp.linear_fc1.weight") == "layers.1.mlp.linear_fc1.weight"


def test_quartiles() -> None:
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def a_row(arm: str, ms: float, **more: Any) -> dict[str, Any]:
    made = layer_arms.Arm(arm, step=lambda: None, active=lambda: None, facts={"peak_memory_gb": 7.0})
    samples = {
        "step_ms": [ms * 4 * f for f in (0.9, 1.0, 1.1)],
        "host_ms": [8.0, 9.0, 10.0],
        "sm_clock_mhz": [None, 1500.0, 1400.0],
        "throttle_reasons": [[], ["sw_power_cap"], ["hw_slowdown", "sw_power_cap"]],
    }
    agreement = {"with": "te", "y": 0.01, "ok": more.pop("ok", True)} if arm != "floor" else None
    return row(GPT, made, samples, agreement, more.get("breakdown", {}), more.get("trace"), "nvlink")


@pytest.fixture
def summary() -> dict[str, Any]:
    exposed = {"communication_exposed_ms": 5.0, "idle_ms": 0.25}
    rows = [
        a_row("te", 20.0, breakdown=exposed, trace="trace-te.json.gz"),
        a_row("flux_local", 17.0, ok=False),
        a_row("floor", 15.0),
    ]
    complete(rows)
    skipped = [{**GPT.model_dump(), "arm": "te_ub", "reason": "<it> [did] not start"}]
    return {"device": "A & B", "tp": 8, "link": "nvlink", "versions": {}, "rows": rows, "skipped": skipped}


def test_rows_have_what_others_rely_on(summary: dict[str, Any]) -> None:
    te, flux, floor = summary["rows"]
    for found in summary["rows"]:
        for name in ("model", "seq", "micro_batch", "arm", "ms_per_layer", "speedup_vs_te", "peak_memory_gb"):
            assert found[name] is not None
        assert isinstance(found["breakdown"], dict)
    assert (te["speedup_vs_te"], te["hidden_share"]) == (1.0, 0.0)
    assert (flux["speedup_vs_te"], flux["hidden_share"]) == (pytest.approx(20 / 17, abs=1e-4), 0.6)
    assert (floor["hidden_share"], floor["training"], floor["agreement"]) == (1.0, False, None)
    assert (te["ms_per_layer"], te["ms_per_layer_low"], te["ms_per_layer_high"]) == (20.0, 19.0, 21.0)
    assert te["host_ms_per_step"] == 9.0
    assert te["sm_clock_mhz"] == 1450.0
    assert te["throttle_reasons"] == ["hw_slowdown", "sw_power_cap"]
    json.dumps(summary, allow_nan=False)


def test_without_te_or_a_faster_floor_nothing_is_made_up() -> None:
    rows = [a_row("local", 20.0), a_row("floor", 15.0)]
    complete(rows)
    assert all(r["speedup_vs_te"] is None and r["hidden_share"] is None for r in rows)
    rows = [a_row("te", 20.0), a_row("floor", 20.0)]
    complete(rows)
    assert [r["hidden_share"] for r in rows] == [None, None]


def test_table(summary: dict[str, Any]) -> None:
    summary["rows"][1]["flux_fallbacks"] = {"row: [fp8]": 4}
    text = io.StringIO()
    report.show_layers(summary, text)
    said = text.getvalue()
    for part in ("gpt3-175b, 2048 x 4, 4 layers", "20.000 (19.000-21.000)", "1.177x", "60%", "NO", "floor, no training",
                 "te_ub skipped: <it> [did] not start", "5.000", "1450", "4 calls ran stock: row: [fp8]"):  # fmt: skip
        assert part in said
    report.show_layers({**summary, "rows": []}, text)


def test_titles_name_the_recipe(summary: dict[str, Any]) -> None:
    for one in summary["rows"]:
        one["fp8"] = "current"
    text = io.StringIO()
    report.show_layers(summary, text)
    assert "gpt3-175b, 2048 x 4, FP8 current, 4 layers" in text.getvalue()


def test_arms_without_their_packages() -> None:
    cpu = torch.device("cpu")
    assert layer_arms.why_not("floor", cpu, "none") is None
    assert layer_arms.why_not("te_ub", cpu, "none") == "TransformerEngine needs a GPU"


def test_arms_that_the_link_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_arms.importlib.util, "find_spec", lambda name: name)
    gpu = torch.device("cuda", 0)
    for link in ("host", "none"):
        for arm in ("te_ub", "busy_floor"):
            assert layer_arms.why_not(arm, gpu, link) == f"it needs peer access between GPUs; the link is {link}"
        for arm in ("te", "local", "flux_te", "flux_local", "floor"):
            assert layer_arms.why_not(arm, gpu, link) is None
    assert layer_arms.why_not("flux_te_fp8wire", gpu, "host") is None
    assert layer_arms.why_not("flux_te_fp8wire", gpu, "p2p") is None
    refused = "8-bit wires are for the links host and p2p; the link is nvlink"
    assert layer_arms.why_not("flux_te_fp8wire", gpu, "nvlink") == refused
    assert layer_arms.why_not("busy_floor", gpu, "p2p") is None


def test_a_wire_has_arms_of_its_own() -> None:
    config = resolve(LayerOptions(arms="te,flux_te,flux_local,floor", link="host", wire="fp8"), 8)
    assert config.arms == ("te", "flux_te", "flux_te_fp8wire", "flux_local", "flux_local_fp8wire", "floor")
    assert (config.link, config.wire) == ("host", "fp8")
    sent = [layer_arms.wires_of(arm) for arm in config.arms]
    assert [set(wires) for wires in sent] == [{"exact"}, {"exact"}, {"fp8"}, {"exact"}, {"fp8"}, {"exact"}]
    assert [layer_arms.block_of(arm) for arm in config.arms[2:5]] == ["te", "local", "local"]
    config = resolve(LayerOptions(arms="flux_local", link="host", grad_wire="int8"), 8)
    assert config.arms == ("flux_local", "flux_local_exact_int8wire")
    assert layer_arms.wires_of(config.arms[1]) == ("exact", "int8")
    assert resolve(LayerOptions(arms="flux_te_int8wire,te", wire="int8"), 8).arms == ("flux_te_int8wire", "te")


def test_command_refuses_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "layer", "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, UserError)
    assert "no CUDA device is visible here" in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_dry_run_works_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = [
        "bench",
        "layer",
        "--dry-run",
        "--no-trace",
        "--nproc",
        "4",
        "--models",
        "gpt3-175b",
        "--arms",
        "te,local",
    ]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["config"]["tp"] == 4
    assert said["config"]["trace"] is False
    assert list(said["memory_gb_per_gpu"]) == ["gpt3-175b-2048x4", "gpt3-175b-2048x1"]
    assert not (tmp_path / "run").exists()


def test_what_stood_in_is_named_in_the_table() -> None:
    found = json.loads((STAND_IN / "layer" / "summary.json").read_text())
    text = io.StringIO()
    report.show_layers(found, text)
    assert text.getvalue().startswith(
        "NVIDIA H200 (2 standing in for 8), tp 8, nvlink stand-in, NVLink multicast off (NCCL_"
    )


def test_arms_share_parameters_and_their_gradients() -> None:
    first, second = (torch.nn.Sequential(torch.nn.Linear(3, 2)) for _ in range(2))
    weights = prepare_gradients(first)
    share(second, weights)
    assert all(a is b for a, b in zip(first.parameters(), second.parameters(), strict=True))
    first(torch.ones(4, 3)).sum().backward()
    second(torch.ones(4, 3)).sum().backward()
    for parameter, each in ((first[0].weight, 4.0), (first[0].bias, 4.0)):
        assert parameter.grad is None
        assert parameter.main_grad.eq(2 * each).all()
    with pytest.raises(FluxError, match=r"do not have the same parameters: 0\.bias"):
        share(torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)), weights)
    with pytest.raises(FluxError, match=r"0\.weight is \(2, 4\) in one arm, \(2, 3\) in others"):
        share(torch.nn.Sequential(torch.nn.Linear(4, 2)), weights)
