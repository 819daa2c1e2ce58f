"""Records on GPUs: operator times, NVML, traces and their parts; asking for names costs no context."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flux.metrics.recorder import read_records
from tests.gpu.test_commands import SMALL, run

pytestmark = pytest.mark.gpus(2)

NO_CONTEXT = """
import ctypes, json
from megatron_flux import nvml
from megatron_flux.telemetry import environment
named = [environment.device_name(), environment.link(), environment.versions()]
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
flags, active = ctypes.c_uint(), ctypes.c_int()
assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
import torch
nvml.pairs = lambda: None
seen = environment.link()
print(json.dumps([active.value, named[0], named[1], torch.cuda.get_device_name(0), seen]))
"""


def test_names_and_links_make_no_context_and_agree_with_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", NO_CONTEXT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    active, name, link, cuda_name, cuda_link = json.loads(done.stdout.splitlines()[-1])
    assert active == 0
    assert name == cuda_name
    assert (link["kind"], link["pairs"], link["peer_access"]) == tuple(
        cuda_link[key] for key in ("kind", "pairs", "peer_access")
    )


def test_samples_and_traces(tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--set", "sample_interval=2", "--set", "block_steps=8", "--profile-steps", "11-12"]
    run("compare", "--nproc", "2", "--steps", "16", "--out", out, *SMALL, *more)
    for side in ("baseline", "flux"):
        rows = read_records(out / side / "metrics.jsonl")
        assert rows[0]["flux/run"]["gpu_source"].startswith("NVML, driver ")
        sampled = [row for row in rows if row["flux/sampled"] and not row["profiled"]][1:]
        glances = [row["flux/gpu"] for row in sampled if row["flux/gpu"] is not None]
        assert glances, "no glance at a GPU came in time"
        for gpu in glances:
            assert 100 < gpu["sm_clock_mhz_min"] < 4000
            assert gpu["power_w_mean"] > 20
            assert 0 < gpu["temperature_c_max"] < 120
        for row in sampled:
            assert all(memory > 0 for memory in row["flux/ranks"]["peak_memory_bytes"])
            times = row["flux/operator_time_ms"]
            if side == "baseline":
                assert times == {}
                continue
            assert sum(times.values()) < 1e3 * row["iteration-time"]
            for call in row["flux/calls"]:
                assert call["source"] == "measured", call
                assert call["time_ms"] >= 0
                if call["gemm_ms"]:
                    assert 100 < call["sm_clock_mhz"] < 4000, call
                assert (call["exposed_ms"] is None) == bool(call["withheld"]), call
                if not call["withheld"]:
                    assert call["exposed_ms"] >= 0, call
                    assert call["e_overlap"] is None or call["e_overlap"] <= 1, call
        if side == "flux":  # by now of several rounds
            for call in sampled[-1]["flux/calls"]:
                assert call["gemm_ms"] <= call["serial_ms"] * 1.1, call
        check_trace(out / side, side)


def check_trace(folder: Path, side: str) -> None:
    found = json.loads((folder / "breakdown.json").read_text())
    assert found["steps"] == [11, 12]
    parts = found["parts"]
    assert sum(parts.values()) == pytest.approx(found["span_ms"], rel=1e-3)
    assert parts["gemm"] > 0
    assert parts["optimizer"] > 0
    assert parts["fused"] + parts["communication_exposed"] + found["communication_hidden_ms"] > 0
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((folder / "trace" / f"rank{rank:05d}.json.gz").read_bytes()))
        named = [e for e in trace["traceEvents"] if str(e.get("name")).startswith("flux::all_gather_gemm")]
        # On the host's timeline and, through the profiler, on the GPU's.
        assert {e["cat"] for e in named} == ({"user_annotation", "gpu_user_annotation"} if side == "flux" else set())
