"""Peak memory of ``compare``: each side's own, as two trainings by themselves have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.metrics.recorder import read_records
from tests.gpu.test_commands import run

pytestmark = pytest.mark.gpus(2)

MODEL = [
    *("--hidden-size", "2048", "--ffn-hidden-size", "8192", "--num-attention-heads", "16", "--seq-length", "1024"),
    *("--micro-batch-size", "4", "--num-layers", "4", "--backend", "fused"),
]  # no tuner, whose measuring takes memory of its own in whichever run comes first
SIDES = {"baseline": "--no-flux", "flux": "--flux"}


def figures(folder: Path, side: str) -> list[dict[str, Any]]:
    names = ("peak-memory-bytes", "flux/allocated_peak_bytes", "flux/workspace_bytes")
    return [{name: record[name] for name in names} for record in read_records(folder / side / "metrics.jsonl")]


def test_arms_of_a_comparison_have_what_each_has_alone(tmp_path: Path) -> None:
    both = tmp_path / "compare"
    run("compare", "--nproc", "2", "--steps", "6", "--set", "block_steps=2", "--out", both, *MODEL)
    summary = json.loads((both / "summary.json").read_text())
    said = {}
    for side, switch in SIDES.items():
        alone = tmp_path / side
        run("train", "--nproc", "2", "--steps", "6", switch, "--out", alone, *MODEL)
        shared, own = figures(both, side), figures(alone, side)
        said[side] = [shared[-1], own[-1]]
        for here, there in zip(shared, own, strict=True):
            assert here["peak-memory-bytes"] == pytest.approx(there["peak-memory-bytes"], rel=0.04), said
            assert here["flux/workspace_bytes"] == there["flux/workspace_bytes"]
            assert here["peak-memory-bytes"] == here["flux/allocated_peak_bytes"] + here["flux/workspace_bytes"]
        # No jump when the other side steps for the first time.
        assert max(peak["peak-memory-bytes"] for peak in shared[1:]) < 1.02 * shared[1]["peak-memory-bytes"], shared
        found = summary["arms"][side]
        assert found["peak_memory_bytes"] == max(peak["peak-memory-bytes"] for peak in shared)
    assert said["baseline"][0]["flux/workspace_bytes"] == 0
    assert said["flux"][0]["flux/workspace_bytes"] > 0
    print("peak memory, in the comparison and alone:", json.dumps(said))
