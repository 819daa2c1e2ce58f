"""A user's own sbatch script: flux by one line, and the node launcher in place of torch.distributed.run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_flux.slurm import queue
from tests.megatron_lm.stand_in import write_tree
from tests.slurm.cluster import Cluster
from tests.slurm.golden import FOLDER

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

OWN = FOLDER / "own-script.sbatch"
OPTIONS = ["--nodes=2", "--gpus-per-node=1"]
CRASH = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    print("here is rank", os.environ["RANK"])
    if os.environ["RANK"] == "1":
        raise ValueError("layer 3\\nhas no weights")
    time.sleep(300)

main()
"""


@pytest.fixture(autouse=True)
def active_environment(at_the_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' Python, as an activated environment has it."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_one_line_switches_flux_on(at_the_cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes, one rank on each, an unmodified Megatron-LM script (a stand-in of its shape)."""
    script = write_tree(tmp_path / "megatron-lm") / "pretrain_tiny.py"
    words = [str(script), "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    job = queue.submit(OWN, options=OPTIONS, arguments=words)
    shown = at_the_cluster.wait_for_job(job)
    said = Path(shown["StdOut"]).read_text()
    rows = [json.loads(line.split(" ", 1)[1]) for line in said.splitlines() if line.startswith("tensorboard ")]
    assert [value for _, name, value in rows if name == "flux/active_layers"] == [2, 2, 2], said
    assert len([value for _, name, value in rows if name == "lm loss"]) == 3


def test_the_node_launcher_names_the_first_failure(
    at_the_cluster: Cluster, warm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = OWN.read_text()
    assert text.count("python3 -m torch.distributed.run") == 1
    text = text.replace("python3 -m torch.distributed.run", f"{warm_python} -m megatron_flux.run.node")
    Path("own.sbatch").write_text(text)
    Path("crash.py").write_text(CRASH)
    monkeypatch.setenv("MEGATRON_FLUX_FAILURES", str(tmp_path / "failures"))
    job = queue.submit(Path("own.sbatch"), options=OPTIONS, arguments=["-m", "crash"])
    shown = at_the_cluster.wait_for_job(job, ("FAILED",))
    (line,) = (tmp_path / "failures" / "n01").read_text().splitlines()
    order, before, said = line.split(" ", 2)
    assert (order, before, said) == ("1", "0", "rank 1 on n01 failed: ValueError: layer 3 has no weights (exit code 1)")
    assert not (tmp_path / "failures" / "n00").exists(), "a node that was stopped has no failure of its own"
    lines = Path(shown["StdOut"]).read_text().splitlines()
    assert f"megatron-flux: error: {said}" in lines
    assert "[rank 1] here is rank 1" in lines
    assert "[rank 1] ValueError: layer 3" in lines
