"""``bench layer`` on two GPUs: a small model through the command, with traces, and with CUDA graphs."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpus(2)

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "megatron_flux.cli", "bench", "layer", "--models", "tiny", "--nproc", "2"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--out", str(out), *arguments], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "summary.json").read_text())


def test_arms_traces_and_memory(tmp_path: Path) -> None:
    summary = bench(tmp_path / "run", "--arms", "te,local,flux_local,flux_te,floor")
    rows = {r["arm"]: r for r in summary["rows"]}
    expected = ["te"] * HAVE_TE + ["local", "flux_local", "floor"]
    assert [arm for arm in rows if arm != "flux_te"] == expected
    # TransformerEngine's layers run flux, or the arm is left out with a reason: never stock under another name.
    skipped = {s["arm"]: s["reason"] for s in summary["skipped"]}
    assert ("flux_te" in rows) != bool(skipped.get("flux_te"))
    for arm, row in rows.items():
        assert row["ms_per_layer"] > 0
        assert row["host_ms_per_step"] > 0
        assert row["peak_memory_gb"] > 0
        if row["training"]:
            assert row["agreement"]["ok"], (arm, row["agreement"])
        with gzip.open(tmp_path / "run" / row["trace"], "rt") as file:
            trace = json.load(file)
        assert any(e.get("cat") == "kernel" for e in trace["traceEvents"])
        assert str(tmp_path) not in json.dumps(trace)
        parts = row["breakdown"]
        assert parts["gemm_ms"] + parts["fused_ms"] > 0
        assert parts["norm_ms"] > 0
        assert parts["attention_ms"] > 0
        assert parts["communication_ms"] == pytest.approx(
            parts["communication_exposed_ms"] + parts["communication_hidden_ms"], abs=2e-4
        )
    assert rows["local"]["breakdown"]["communication_ms"] > 0
    assert rows["floor"]["breakdown"]["communication_ms"] == 0
    assert rows["flux_local"]["flux_layers"] == 8
    assert rows["flux_local"]["flux_fallbacks"] == {}
    for name in ("log.txt", "rounds.jsonl", "config.json"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_fused_backend_computes_the_same(tmp_path: Path) -> None:
    summary = bench(tmp_path / "run", "--arms", "local,flux_local", "--backend", "fused", "--no-trace")
    local, flux = summary["rows"]
    assert flux["agreement"]["ok"], flux["agreement"]
    assert flux["agreement"]["with"] == "local"
    assert set(flux["flux_calls_per_step"]) == {
        "all_gather/fused", "all_gather_gemm/fused", "gemm_reduce_scatter/fused",
    }  # fmt: skip
    assert local["breakdown"] == {}
    assert local["trace"] is None


@pytest.mark.skipif(not HAVE_TE, reason="TransformerEngine is not installed")
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_fp8(tmp_path: Path, recipe: str) -> None:
    arms = ("--arms", "te,flux_te,floor,busy_floor", "--backend", "fused")
    summary = bench(tmp_path / "run", *arms, "--fp8", recipe, "--no-bf16")
    assert summary["skipped"] == []
    rows = {row["arm"]: row for row in summary["rows"]}
    assert {row["fp8"] for row in rows.values()} == {recipe}
    flux, floor = rows["flux_te"], rows["floor"]
    assert flux["agreement"]["ok"], flux["agreement"]
    assert (flux["flux_layers"], flux["flux_fallbacks"]) == (8, {})
    assert flux["flux_calls_per_step"]["all_gather_gemm/fused"] == 8
    assert flux["flux_calls_per_step"]["gemm_reduce_scatter/fused"] == 8
    assert floor["breakdown"]["communication_ms"] == 0, "no collective, of amaxes either"
    assert floor["breakdown"]["gemm_ms"] > 0


def test_cuda_graphs_or_the_reason(tmp_path: Path) -> None:
    summary = bench(tmp_path / "run", "--arms", "te,local,flux_local,floor", "--cuda-graphs", "--no-trace")
    for row in summary["rows"]:
        assert row["cuda_graph"] is (row["cuda_graph_reason"] is None)
        assert row["cuda_graph"] or row["cuda_graph_reason"]
    assert {r["arm"]: r["cuda_graph"] for r in summary["rows"]}["floor"], summary["rows"]
