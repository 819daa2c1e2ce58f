"""Examples for users: the scripts are clean shell, and run as written as far as this machine can."""

import json
import os
from pathlib import Path

import pytest

from megatron_flux.slurm import queue
from tests.megatron_lm.stand_in import write_tree
from tests.slurm.cluster import Cluster

FOLDER = Path(__file__).parents[2] / "examples"


def test_your_own_job_runs_flux(
    at_the_cluster: Cluster, warm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, one rank on each, an unmodified Megatron-LM script (a substitute of its shape)."""
    (tmp_path / "python3").symlink_to(warm_python)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "on nodes n[00-01]" in queue.slurm("sbatch", "--test-only", str(FOLDER / "pcie.sbatch"))
    script = write_tree(tmp_path / "megatron-lm") / "pretrain_tiny.py"
    words = [str(script), "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    job = queue.slurm("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=1", str(FOLDER / "nvlink.sbatch"), *words)
    said = Path(at_the_cluster.wait_for_job(job)["StdOut"]).read_text()
    rows = [json.loads(line.split(" ", 1)[1]) for line in said.splitlines() if line.startswith("tensorboard ")]
    assert [value for _, name, value in rows if name == "flux/active_layers"] == [2, 2, 2], said
    assert len([value for _, name, value in rows if name == "lm loss"]) == 3
