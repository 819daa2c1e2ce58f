"""``bench ops``, ``peers``, ``layer`` and ``tune`` on two GPUs: small calls and a small model through the commands."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.ops.kernel_config import KernelConfig
from tests.gpu.conftest import HAVE_TE, NEEDS_TE
from tests.gpu.test_commands import COMMAND

pytestmark = [pytest.mark.gpus(2), pytest.mark.slow]

CALLS = ["--preset", "llama2-70b", "--set", "linears=qkv,proj", "--tokens", "1024"]
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NCCL_NVLS_ENABLE")
TIMES = ("gemm_ms", "nccl_ms", "serial_ms", "fused_ms", "tuned_ms", "bound_ms")


def run(cache: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    hidden = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    done = subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**hidden, "MEGATRON_FLUX_TUNE_CACHE": str(cache), "MEGATRON_FLUX_TUNE": "on"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def summary_of(out: Path) -> dict[str, Any]:
    for name in ("rounds.jsonl", "config.json"):
        assert (out / name).stat().st_size > 0
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_bench_ops(tmp_path: Path) -> None:
    out = tmp_path / "run"
    short = ["--tp", "2", "--rounds", "2", "--set", "burst=2", "--directions", "forward,decode"]
    done = run(tmp_path / "tuned.json", "bench", "ops", *CALLS, *short, "--out", out)
    summary = summary_of(out)
    assert (summary["tp"], summary["link"] in ("nvlink", "p2p")) == (2, True)
    assert all(summary["versions"][name] for name in ("torch", "triton", "cuda", "nccl"))
    off = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert summary["environment"].items() >= off.items()
    gather, scatter, reduce = summary["rows"]
    assert [row["op"] for row in summary["rows"]] == ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"]
    stored = json.loads((tmp_path / "tuned.json").read_text())
    for row in (gather, scatter):
        assert all(row[name] > 0 for name in TIMES)
        assert row["bound_ms"] >= row["gemm_ms"]
        plan = next(stored[key] for key in stored if key.startswith(f"{row['op']} m={row['m']} n={row['n']} "))
        assert row["tuned_choice"].split()[0] == plan["backend"]
        assert row["tuned_choice"] in done.stdout
    assert all(reduce[f"{name}_ms"] > 0 for name in ("gemm", "nccl", "serial", "tuned"))
    assert all(max(row["differences"].values()) < 1e-2 for row in summary["rows"])
    assert "E fused" in done.stdout


def test_bench_peers(tmp_path: Path) -> None:
    """What torch and this package have by themselves runs and is right; every other arm has a reason."""
    out, names = tmp_path / "run", {"nccl", "nccl_symm", "torch_async_tp", "flux"}
    short = ["--tp", "2", "--model", "llama3-8b", "--m", "512", "--rounds", "2", "--set", "burst=2", "--out", out]
    done = run(tmp_path / "tuned.json", "bench", "peers", *short)
    summary = summary_of(out)
    assert all(row["error"] is not None and row["ms"] > 0 for row in summary["rows"] if row["arm"] in names)
    for op in ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"):
        for dtype in ("bf16", "fp8"):
            there = {row["arm"] for row in summary["rows"] if (row["op"], row["dtype"]) == (op, dtype)}
            assert there >= names - ({"torch_async_tp"} if op == "gemm_all_reduce" else set())
    ran = {row["arm"] for row in summary["rows"]}
    assert {one["arm"] for one in summary["skipped"]} >= {"torch_async_tp"}
    assert ran | {one["arm"] for one in summary["skipped"]} > names
    assert "flux vs best other" in done.stdout


def test_tune_fills_a_cache(tmp_path: Path) -> None:
    cache, other = tmp_path / "deep" / "tuned.json", tmp_path / "other.json"
    words = ["tune", *CALLS, "--directions", "forward", "--tp", "2", "--set", f"cache={cache}"]
    done = run(other, *words)
    assert "(cached)" not in done.stderr
    stored = json.loads(cache.read_text())
    assert [key.split()[0] for key in sorted(stored)] == ["all_gather_gemm", "gemm_reduce_scatter"]
    for plan in stored.values():
        assert {"reference"} < set(plan["ms"])
        assert plan["plan"] is None or KernelConfig(**plan["plan"])
    assert done.stdout.count("llama2-70b") == 2
    assert not other.exists()

    assert run(other, *words).stderr.count("(cached)") == 2
    assert json.loads(cache.read_text()) == stored

    assert "(cached)" not in run(other, *words, "--force").stderr
    again = json.loads(cache.read_text())
    assert set(again) == set(stored)
    assert again != stored


def layers(out: Path, *words: str) -> dict[str, Any]:
    small = ("--preset", "small", "--tp", "2", "--rounds", "3", "--out", out)
    run(out.parent / "tuned.json", "bench", "layer", *small, *words)
    return summary_of(out)


def test_variants_traces_and_memory(tmp_path: Path) -> None:
    names = ("te", "local", "local_again", "flux_local", "flux_te", "no_communication")
    summary = layers(tmp_path / "run", "--variants", ",".join(names))
    rows = {r["arm"]: r for r in summary["rows"]}
    assert [name for name in rows if name != "flux_te"] == [
        n for n in names if n != "flux_te" and (HAVE_TE or n != "te")
    ]
    # TransformerEngine's layers run flux, or the variant is left out with a reason: never stock under another name.
    skipped = {s["arm"]: s["reason"] for s in summary["skipped"]}
    assert ("flux_te" in rows) != bool(skipped.get("flux_te"))
    for name, row in rows.items():
        assert min(row["ms_per_layer"], row["host_ms_per_step"], row["peak_memory_gb"]) > 0
        if row["training"]:
            assert row["agreement"]["ok"], (name, row["agreement"])
        with gzip.open(tmp_path / "run" / row["trace"], "rt") as file:
            trace = json.load(file)
        assert any(e.get("cat") == "kernel" for e in trace["traceEvents"])
        assert str(tmp_path) not in json.dumps(trace)
        parts = row["breakdown"]
        assert parts["gemm_ms"] + parts["fused_ms"] > 0
        assert parts["communication_ms"] == pytest.approx(
            parts["communication_exposed_ms"] + parts["communication_hidden_ms"], abs=2e-4
        )
    assert rows["local"]["breakdown"]["communication_ms"] > 0
    assert rows["no_communication"]["breakdown"]["communication_ms"] == 0
    assert (rows["flux_local"]["flux_layers"], rows["flux_local"]["flux_fallbacks"]) == (8, {})


@pytest.mark.parametrize("more", [(), ("--frozen",)], ids=["trained", "frozen"])
def test_zero_3_on_the_same_tokens(tmp_path: Path, more: tuple[str, ...]) -> None:
    names = ("te" if HAVE_TE else "local", "fsdp", "fsdp_bf16")
    summary = layers(tmp_path / "run", "--variants", ",".join(names), *more)
    assert summary["skipped"] == []
    for row in summary["rows"]:
        assert row["agreement"]["ok"], (row["arm"], row["agreement"])
        assert min(row["ms_per_layer"], row["peak_memory_gb"], row["breakdown"]["communication_ms"]) > 0


@NEEDS_TE
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_fp8(tmp_path: Path, recipe: str) -> None:
    names = ("--variants", "te,flux_te,no_communication,unsynchronised", "--backend", "fused")
    summary = layers(tmp_path / "run", *names, "--fp8", recipe)
    assert summary["skipped"] == []
    rows = {row["arm"]: row for row in summary["rows"]}
    flux, bound = rows["flux_te"], rows["no_communication"]
    assert (flux["fp8"], flux["agreement"]["ok"]) == (recipe, True), flux["agreement"]
    assert (flux["flux_layers"], flux["flux_fallbacks"]) == (8, {})
    assert flux["flux_calls_per_step"]["all_gather_gemm/fused"] == 8
    assert flux["flux_calls_per_step"]["gemm_reduce_scatter/fused"] == 8
    assert bound["breakdown"]["communication_ms"] == 0, "no collective, of amaxes either"
    assert bound["breakdown"]["gemm_ms"] > 0


@pytest.mark.parametrize("more", [(), ("--no-sequence-parallel",), ("--fp8", "current")], ids=["", "whole", "fp8"])
def test_adapters_beside_frozen_weights(tmp_path: Path, more: tuple[str, ...]) -> None:
    """In FP8 there are TransformerEngine's layers alone."""
    names = ("te", "local", "flux_local", "flux_te", "no_communication")
    ran = [name for name in names if ("te" not in name or HAVE_TE) and not ("local" in name and "--fp8" in more)]
    summary = layers(tmp_path / "run", "--variants", ",".join(names), "--lora", "16", *more)
    rows = {row["arm"]: row for row in summary["rows"]}
    assert [name for name in ran if name not in rows] == ([] if HAVE_TE or "--fp8" not in more else ran)
    for name, row in rows.items():
        assert (row["lora"], row["frozen"]) == (16, True)
        assert not row["training"] or row["agreement"]["ok"], (name, row["agreement"])
        if name.startswith("flux"):
            assert (row["flux_layers"], row["flux_fallbacks"]) == (24, {}), "linears, and A and B of each"
            assert "left_out" not in row["agreement"]
    if "no_communication" in rows:
        assert rows["no_communication"]["breakdown"]["communication_ms"] == 0, "no collective of adapters either"


def test_cuda_graphs_or_the_reason(tmp_path: Path) -> None:
    names = ("--variants", "te,local,flux_local,no_communication")
    summary = layers(tmp_path / "run", *names, "--set=cuda_graphs=true", "--set=trace=false")
    for row in summary["rows"]:
        assert row["cuda_graph"] is (row["cuda_graph_reason"] is None)
        assert row["cuda_graph"] or row["cuda_graph_reason"]
    assert {r["arm"]: r["cuda_graph"] for r in summary["rows"]}["no_communication"], summary["rows"]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_passes_without_gradients(tmp_path: Path, mode: str) -> None:
    names = ("te", "local", "flux_local", "flux_te", "no_communication")
    summary = layers(tmp_path / "run", "--mode", mode, "--variants", ",".join(names), "--micro-batch-size", "1,8")
    ran = [name for name in names if HAVE_TE or "te" not in name]
    assert [row["arm"] for row in summary["rows"]] == ran * 2, summary["skipped"]
    for row in summary["rows"]:
        assert row["agreement"] is None or row["agreement"]["ok"], row
        assert row["context_length"] == (2048 if mode == "decode" else None)
        assert row.get("cuda_graph", False) is (mode == "decode"), row.get("cuda_graph_reason")
