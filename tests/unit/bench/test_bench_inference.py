"""``bench inference`` without processes: what is asked for, rows, tables, the picture, the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from megatron_flux.bench import all_reduce, inference_report, int4_mlp
from megatron_flux.bench.inference import NO_MEASURE, parts
from megatron_flux.bench.inference_config import ARMS, InferenceOptions, InferenceWorkload, resolve
from megatron_flux.bench.inference_workload import complete, row
from megatron_flux.bench.layer_arms import Arm
from megatron_flux.cli.main import app
from megatron_flux.errors import UserError

DECODE = InferenceWorkload(
    kind="decode", sequence_parallel=False, model="gpt3-175b", seq=1, micro_batch=8, layers=4, context_length=2048
)


def test_defaults_are_the_documented_ones() -> None:
    config = resolve(InferenceOptions(), 8, "cuda")
    assert [(w.kind, w.model, w.layers, w.seq, w.micro_batch, w.tokens) for w in config.workloads] == [
        *(("prefill", model, layers, 2048, 8, 16384) for model in ("gpt3-175b", "llama-70b") for layers in (1, 4)),
        *(
            ("decode", model, layers, 1, batch, batch)
            for model in ("gpt3-175b", "llama-70b")
            for layers in (1, 4)
            for batch in (1, 8, 64, 512)
        ),
    ]
    assert parts(config)[-3:] == [
        ("gemm_all_reduce", "llama-70b"), ("int4_mlp", "granite-20b"), ("int4_mlp", "llama-70b"),
    ]  # fmt: skip
    assert config.sizes.gemm_all_reduce == all_reduce.ROWS
    assert config.sizes.int4_mlp == int4_mlp.TOKENS == (1, 2, 4, 8, 16)
    assert (config.arms, config.cuda_graphs, config.trace) == (ARMS, True, False)
    assert {(w.kind, w.context_length) for w in config.workloads} == {("prefill", None), ("decode", 2048)}
    longer = resolve(InferenceOptions(context_length=8192), 8, "cuda")
    assert {w.context_length for w in longer.workloads} == {None, 8192}
    assert longer.sizes.context == 8192


def test_on_cpus_all_is_small() -> None:
    config = resolve(InferenceOptions(num_layers=1), 2, "cpu")
    assert {w.model for w in config.workloads} == {"tiny"}
    assert max(w.tokens for w in config.workloads) == 128
    assert len({w.label for w in config.workloads}) == len(config.workloads) == 3
    assert parts(config)[-2:] == [("gemm_all_reduce", "tiny"), ("int4_mlp", "tiny")]


def test_a_kind_measures_the_models_that_it_knows() -> None:
    config = resolve(InferenceOptions(models="granite-20b,gpt3-175b", kinds="int4_mlp,prefill"), 2, "cuda")
    assert config.kinds == ("prefill", "int4_mlp")
    assert config.models == {"prefill": ("gpt3-175b",), "int4_mlp": ("granite-20b",)}
    assert resolve(InferenceOptions(models="gpt3-175b"), 2, "cuda").models["int4_mlp"] == ()


@pytest.mark.parametrize(
    ("options", "tp", "said"),
    [
        ({"kinds": "train"}, 2, "unknown kind 'train'; use one or more of: prefill, decode, gemm_all_reduce, int4_mlp"),
        ({"models": "gpt4"}, 2, "unknown model 'gpt4'"),
        ({"kinds": "prefill", "models": "granite-20b"}, 2, "unknown model 'granite-20b'"),
        ({"backend": "floor7"}, 2, "unknown backend 'floor7'"),
        ({"models": "llama-70b"}, 16, "8 key/value heads cannot be divided among 16 GPUs; give another --tp"),
        ({"kinds": "int4_mlp", "models": "tiny"}, 3, "cannot be divided among 3; give another --tp"),
        ({}, 1, "needs tensor parallelism"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], tp: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve(InferenceOptions(**options), tp, "cuda")


def test_only_prefill_has_sequence_parallelism() -> None:
    prefill = InferenceWorkload(kind="prefill", model="gpt3-175b", seq=2048, micro_batch=8, layers=4)
    assert (prefill.sequence_parallel, DECODE.sequence_parallel) == (True, False)
    weights = 4 * DECODE.shape.layer_weights * 2 / 8 / 1e9  # nothing for backward
    cache = 4 * 2 * 2049 * 8 * 96 * 128 * 2 / 8 / 1e9
    assert DECODE.memory_gb(8, 1) == pytest.approx(weights + cache, rel=0.01)
    assert DECODE.memory_gb(8, 2) == pytest.approx(2 * weights + cache, rel=0.01)
    assert DECODE.to_fit == "fewer --num-layers or a shorter --context-length"
    assert prefill.memory_gb(8, 1) > DECODE.memory_gb(8, 1)


def a_row(arm: str, ms: float, **facts: Any) -> dict[str, Any]:
    samples = {
        "step_ms": [ms * f for f in (0.9, 1.0, 1.1)],
        "host_ms": [0.1, 0.2, 0.3],
        "sm_clock_mhz": [None, 1500.0, 1400.0],
        "throttle_reasons": [[], [], []],
    }
    agreement = facts.pop("agreement", {"with": "te", "y": 0.01, "ok": True})
    return row(DECODE, Arm(arm, lambda: (), lambda: None, facts), samples, agreement)  # type: ignore[arg-type, return-value]


@pytest.fixture
def summary() -> dict[str, Any]:
    layers = [
        a_row("te", 0.5, cuda_graph=True, cuda_graph_reason=None),
        a_row("local", 0.4, cuda_graph=False, cuda_graph_reason="it <waits>"),
        a_row("flux_te", 0.25, agreement={"with": "te", "y": 0.9, "ok": False}, flux_fallbacks={"row: fp8": 3}),
        a_row("floor", 0.2, agreement=None),
    ]
    complete(layers)
    calls = [
        {"kind": "gemm_all_reduce", "model": "llama-70b", "layer": "fc2", "m": 1, "arm": arm, "ms": ms, "ms_low": ms,
         "ms_high": ms, "rounds": 3, "speedup_vs_stock": 0.06 / ms, "chosen": None}
        for arm, ms in (("stock", 0.06), ("flux", 0.04), ("floor", 0.03))
    ]  # fmt: skip
    skipped = [
        *({**DECODE.model_dump(), "layers": layers, "arm": "flux_local", "reason": "no <layer>"} for layers in (1, 4)),
        {"kind": "int4_mlp", "reason": "it knows none of the models that were asked for"},
    ]
    return {
        **{"device": "A & B", "tp": 8, "link": "nvlink", "versions": {}, "environment": {}, "note": None},
        **{"rows": [*layers, *calls], "skipped": skipped, "context_length": 2048},
    }


def test_stock_is_the_faster_of_the_two(summary: dict[str, Any]) -> None:
    found = {r["arm"]: r for r in summary["rows"][:4]}
    assert {r["stock"] for r in found.values()} == {"local"}
    assert {arm: r["speedup_vs_stock"] for arm, r in found.items()} == {
        "te": 0.8, "local": 1.0, "flux_te": 1.6, "floor": 2.0,
    }  # fmt: skip
    te = found["te"]
    assert (te["ms"], te["ms_low"], te["ms_high"], te["ms_per_layer"], te["rounds"]) == (0.5, 0.475, 0.525, 0.125, 3)
    assert (te["kind"], te["m"], te["host_ms"], te["sm_clock_mhz"]) == ("decode", 8, 0.2, 1450.0)
    alone = [a_row("flux_te", 1.0)]
    complete(alone)
    assert (alone[0]["speedup_vs_stock"], alone[0]["stock"]) == (None, None)
    json.dumps(summary, allow_nan=False)


def test_tables_and_picture(summary: dict[str, Any]) -> None:
    text = io.StringIO()
    inference_report.show_inference(summary, text)
    said = text.getvalue()
    for part in (
        "gpt3-175b, 4 layers", "0.2500 (0.2375-0.2625) 1.60x", "local: no CUDA graph: it <waits>",
        "NO: differs from stock",
        "flux_te: 3 calls ran stock: row: fp8", "llama-70b, fc2", "0.0400 (0.0400-0.0400) 1.50x",
        "int4_mlp skipped: it knows none",
    ):  # fmt: skip
        assert part in said
    assert said.count("decode gpt3-175b flux_local skipped: no <layer>") == 1
    assert "every arm in one CUDA graph" not in said
    assert "behind a cache of 2048 tokens' keys and values" in said
    inference_report.show_inference({**summary, "rows": []}, text)


def test_on_cpus_no_factor_is_shown(summary: dict[str, Any]) -> None:
    summary["note"] = NO_MEASURE
    text = io.StringIO()
    inference_report.show_inference(summary, text)
    assert NO_MEASURE in text.getvalue()
    assert "1.60x" not in text.getvalue()


def test_dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["bench", "inference", "--dry-run", "--kinds", "decode", "--num-layers", "3", "--tp", "4", "--link", "host"]
    words += ["--context-length", "5"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["config"]["tp"], found["config"]["link"], found["config"]["device"]) == (4, "host", "cpu")
    assert [(w["layers"], w["micro_batch"]) for w in found["config"]["workloads"]] == [(1, 1), (1, 8), (3, 1), (3, 8)]
    assert {w["context_length"] for w in found["config"]["workloads"]} == {5}
    assert found["note"] == NO_MEASURE
    assert not any(tmp_path.iterdir())
