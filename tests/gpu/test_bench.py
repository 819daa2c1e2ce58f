"""``bench ops`` and ``tune`` on two GPUs: two small calls, every way they can be started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flux.ops.kernel_config import KernelConfig

pytestmark = [pytest.mark.gpus(2), pytest.mark.slow]

COMMAND = ["-m", "megatron_flux.cli"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
CALLS = ["--models", "llama-70b", "--layers", "qkv,proj", "--tokens", "1024", "--directions", "forward"]
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NCCL_NVLS_ENABLE")
ROW_KEYS = {
    "op", "model", "layer", "direction", "m", "n", "k", "dtype", "gemm_ms", "nccl_ms", "serial_ms", "async_tp_ms",
    "pipelined_ms", "fused_ms", "tuned_ms", "tuned_choice", "e_overlap", "bound_ms",
}  # fmt: skip


def run(cache: Path, *words: str | Path, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    hidden = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    done = subprocess.run(
        [sys.executable, *(launcher or []), *COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**hidden, "MEGATRON_FLUX_TUNE_CACHE": str(cache), "MEGATRON_FLUX_TUNE_SECONDS": "10"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.mark.parametrize(
    ("launcher", "more"), [(None, ["--nproc", "2"]), (TORCHRUN, [])], ids=["own launcher", "torchrun"]
)
def test_bench_ops(tmp_path: Path, launcher: list[str] | None, more: list[str]) -> None:
    out = tmp_path / "run"
    short = ["--rounds", "2", "--burst", "2"]
    done = run(tmp_path / "tuned.json", "bench", "ops", *CALLS, *more, *short, "--out", out, launcher=launcher)
    summary = json.loads((out / "summary.json").read_text())
    assert {"device", "tp", "link", "versions", "rows"} <= set(summary)
    assert summary["tp"] == 2
    assert summary["link"] in ("nvlink", "p2p")
    assert all(summary["versions"][name] for name in ("torch", "triton", "cuda", "nccl"))
    off = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert summary["environment"].items() >= off.items()
    assert [row["op"] for row in summary["rows"]] == ["all_gather_gemm", "gemm_reduce_scatter"]
    kept = json.loads((tmp_path / "tuned.json").read_text())
    for row in summary["rows"]:
        assert set(row) >= ROW_KEYS
        assert all(row[name] > 0 for name in ROW_KEYS if name.endswith("_ms"))
        assert row["bound_ms"] >= row["gemm_ms"]
        answer = next(kept[key] for key in kept if key.startswith(f"{row['op']} m={row['m']} n={row['n']} "))
        assert row["tuned_choice"].split()[0] == answer["backend"]
        assert row["tuned_choice"] in done.stdout
    own = [row.get("async_tp_own") for row in summary["rows"]]
    if launcher is None:
        assert summary["async_tp_connections"] == "8"
        assert all(set(one) == {"gemm_ms", "serial_ms", "async_tp_ms"} and min(one.values()) > 0 for one in own)
    else:  # whose processes have started CUDA with the variable as it was
        assert own == [None, None]
        assert "async-TP was not measured with CUDA_DEVICE_MAX_CONNECTIONS=8" in done.stderr
    assert done.stderr.count("[1/2, ") == done.stderr.count("[2/2, ") == 1
    log = (out / "log.txt").read_text()
    assert "[2/2, " in log
    assert "E fused" in log
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "config.json").read_text())["config"]["rounds"] == 2


def test_tune_fills_a_cache(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "tuned.json"
    words = ["tune", *CALLS, "--nproc", "2", "--seconds-per-shape", "10", "--cache", cache]
    done = run(tmp_path / "other.json", *words)
    assert "(kept)" not in done.stderr
    kept = json.loads(cache.read_text())
    assert [key.split()[0] for key in sorted(kept)] == ["all_gather_gemm", "gemm_reduce_scatter"]
    for answer in kept.values():
        assert {"reference", "pipelined"} < set(answer["ms"])
        assert answer["plan"] is None or KernelConfig(**answer["plan"])
    assert done.stdout.count("llama-70b") == 2
    assert not (tmp_path / "other.json").exists()

    assert run(tmp_path / "other.json", *words).stderr.count("(kept)") == 2
    assert json.loads(cache.read_text()) == kept

    assert "(kept)" not in run(tmp_path / "other.json", *words, "--force").stderr
    again = json.loads(cache.read_text())
    assert set(again) == set(kept)
    assert again != kept

    shown = run(tmp_path / "other.json", "tune", "--show", "--cache", cache).stdout
    assert shown.count("all_gather_gemm") == shown.count("gemm_reduce_scatter") == 1
