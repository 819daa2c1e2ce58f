"""Real training through the real script on two nodes: stopped and resumed, a node lost, a rank killed, collected.

Steps are few and starts are dear, so each job shows several things. What all of them compute is the same training: on
the CPU stock and flux add in the same order, so every loss curve must be equal to the last digit to the one of the job
that was never interrupted, whatever happened to the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_flux.metrics import read_records
from megatron_flux.slurm.profile import Profile
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import ROOT, Slurm

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS = 40
# Dropout: a resume that did not restore the random state would show.
SETTINGS = ["dropout=0.1", "micro_batch_size=1", "global_batch_size=1", "seq_length=64", "log_interval=10"]
LOCAL = ["--profile", "local", "--job", "tiny", *(f"--set={pair}" for pair in SETTINGS)]
LOCAL.append("--set=data=../slurm-text")  # beside the folder of each test


@pytest.fixture(autouse=True)
def text_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that stays the same for all jobs here, and its tokens."""
    text = tmp_path_factory.getbasetemp() / "slurm-text"
    if not text.exists():
        shutil.copytree(ROOT / "megatron_flux" / "train", text, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("MEGATRON_FLUX_CACHE", str(tmp_path_factory.getbasetemp() / "slurm-cache"))


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    """Losses of the job that ran through, filled by the first test."""
    return []


def submit(slurm: Slurm, mode: str, *words: str) -> tuple[str, str, Path]:
    """The ids of a job and of the one that collects it, and its folder."""
    said = slurm("submit", *LOCAL, "--mode", mode, *words)
    first, second = re.findall(r"job (\d+)", said)[:2]
    return first, second, Path(re.search(r"folder: (.*)", said)[1])


def recorded(root: Path, arm: str) -> int:
    file = root / "rep-0" / "run" / arm / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def losses(root: Path, arm: str) -> list[float]:
    records = read_records(root / "rep-0" / "run" / arm / "metrics.jsonl")
    assert [record["iteration"] for record in records] == list(range(1, len(records) + 1))
    return [record["lm loss"] for record in records]


def log_of(cluster: Cluster, job: str) -> list[str]:
    file = Path(cluster.job(job)["StdOut"])
    return file.read_text().strip().splitlines() if file.exists() else []


def rank_process(root: Path, rank: int) -> psutil.Process:
    """The process of a rank: its words name the job's folder, its environment the rank, and a launcher began it."""
    for process in psutil.process_iter():
        try:
            mine = any(word.startswith(f"--out={root}") for word in process.cmdline())
            # A rank that saves forks processes which look like it.
            launched = mine and "megatron_flux.run.node" in process.parent().cmdline()
            if launched and process.environ().get("RANK") == str(rank):
                return process
        except (psutil.Error, AttributeError):
            continue
    raise AssertionError(f"rank {rank} is not there")


def test_a_killed_rank_is_named_and_retried_and_a_cancelled_job_resumed(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[float]
) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_PREFLIGHT", "0")
    words = ["--set", "steps=1000000", "--set", "save_interval=20", "--set", "save_keep=2"]
    job, collecting, root = submit(slurm, "baseline", *words)
    at_the_cluster.wait(lambda: recorded(root, "baseline") >= STEPS, "the steps to compare with", 300)
    os.kill(rank_process(root, 1).pid, signal.SIGKILL)
    at_the_cluster.wait(lambda: at_the_cluster.job(job)["Restarts"] == "1", "the retry")
    said = "megatron-flux: retry 1 of at most 1, without n01: rank 1 on n01 was killed by SIGKILL (exit code -9)"
    assert said in log_of(at_the_cluster, job)
    first = losses(root, "baseline")
    uninterrupted += first[:STEPS]
    assert uninterrupted[-1] < uninterrupted[0] - 0.5, "the loss does not fall"

    at_the_cluster.release(job)
    resuming = f"megatron-flux: training: --load={root}/rep-0/checkpoints; "
    at_the_cluster.wait(lambda: resuming in "\n".join(log_of(at_the_cluster, job)), "the retry to begin")
    assert "n01" not in at_the_cluster.hosts(job)
    at_the_cluster.client("scancel", job)
    at_the_cluster.wait_for_job(job, ("CANCELLED",))
    shown = slurm("status", root)
    assert f"tiny-baseline job {job}: CANCELLED" in shown
    assert "rep-0: not ended, step baseline " in shown
    assert "    retried without n01\n" in shown
    assert re.search(r"    last line of .*: slurmstepd.*CANCELLED AT", shown), shown
    # afterok: nothing is collected of a job that did not end well.
    at_the_cluster.wait(lambda: at_the_cluster.job(collecting)["JobState"] == "CANCELLED", "the collecting job to go")

    again = re.search(r"job (\d+): rep-0 goes on from step \d+0; job \d+ collects it", slurm("resume", root))[1]
    at_the_cluster.wait(lambda: recorded(root, "baseline") > len(first), "the resumed job to get further", 300)
    assert resuming in "\n".join(log_of(at_the_cluster, again))
    at_the_cluster.client("scancel", again)
    at_the_cluster.wait_for_job(again, ("CANCELLED",))
    assert losses(root, "baseline")[: len(first)] == first
    assert f"tiny-baseline job {job}, resumed as {again}: CANCELLED" in slurm("status", root)


def test_a_lost_node_is_replaced_and_training_resumes(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[float]
) -> None:
    monkeypatch.setenv("MEGATRON_FLUX_PREFLIGHT", "0")
    words = ["--set", f"steps={STEPS}", "--set", "save_interval=10", "--set", "save_keep=2"]
    job, _, root = submit(slurm, "flux", *words)
    tracker = root / "rep-0" / "checkpoints" / "latest_checkpointed_iteration.txt"
    at_the_cluster.wait(tracker.exists, "a checkpoint", 300)
    at_the_cluster.client("scontrol", "update", "nodename=n01", "state=down", "reason=test")
    try:
        at_the_cluster.wait(lambda: at_the_cluster.job(job)["Restarts"] == "1", "the job to be requeued")
        at_the_cluster.release(job)
        at_the_cluster.wait_for_job(job)
    finally:
        at_the_cluster.client("scontrol", "update", "nodename=n01", "state=resume")
        at_the_cluster.idle()
    hosts = at_the_cluster.hosts(job)
    assert len(hosts) == 2
    assert "n01" not in hosts
    said = "\n".join(log_of(at_the_cluster, job))
    assert f"start 1, on {at_the_cluster.job(job)['NodeList']}" in said
    assert f"training: --load={root}/rep-0/checkpoints" in said
    assert losses(root, "flux") == uninterrupted
    assert json.loads((root / "rep-0" / "run" / "ended.json").read_text())["state"] == "finished"
    assert len(list((root / "rep-0" / "checkpoints").glob("iter_*"))) == 2
    assert {path.name for path in (root / "rep-0" / "logs").iterdir()} == {"0", "1"}


def test_a_comparison_is_stopped_requeued_resumed_and_collected(
    at_the_cluster: Cluster, slurm: Slurm, uninterrupted: list[float]
) -> None:
    """With a save of each arm behind it: nothing of that may be in the way of the next."""
    words = ["--set", "block_steps=2", "--set", "save_interval=2", "--set", "save_keep=1"]
    job, collecting, root = submit(slurm, "compare", "--set", f"steps={STEPS}", *words)
    tracker = root / "rep-0" / "checkpoints" / "flux" / "latest_checkpointed_iteration.txt"
    at_the_cluster.wait(tracker.exists, "both arms to be saved", 300)
    at_the_cluster.client("scancel", "--batch", "--signal=USR1", job)
    at_the_cluster.wait(lambda: at_the_cluster.job(job)["Restarts"] == "1", "the job to be requeued", 120)
    ended = json.loads((root / "rep-0" / "run" / "ended.json").read_text())
    assert ended["state"] == "stopped"
    reached = {arm: recorded(root, arm) for arm in ("baseline", "flux")}
    assert ended["iterations"] == reached
    assert max(reached.values()) < STEPS
    at_the_cluster.wait(lambda: at_the_cluster.job(job)["JobState"] == "PENDING", "the job to be waiting")
    assert "stopped, step baseline " in slurm("status", root)
    at_the_cluster.release(job)
    at_the_cluster.wait_for_job(job)
    said = "\n".join(log_of(at_the_cluster, job))
    assert "requeue 1 of at most 3" in said
    for arm in ("baseline", "flux"):
        assert losses(root, arm) == uninterrupted, arm
    preflight = root / "rep-0" / "logs" / "1" / "preflight"
    assert {file.name for file in preflight.iterdir()} == {
        *(f"{host}.json" for host in at_the_cluster.hosts(job)),
        "together.json",
    }

    at_the_cluster.wait_for_job(collecting)
    collected: dict[str, Any] = json.loads((root / "collected.json").read_text())
    (one,) = collected["repetitions"]
    assert one["state"] == "finished"
    assert one["starts"] == 2
    assert one["max_relative_loss_difference"] == 0
    assert one["flux_active_layers"] == 9
    assert collected["speedup_median"] == one["speedup"] > 0
    assert "plotly" in (root / "rep-0" / "run" / "report.html").read_text()
    assert "| 0 | finished | 2 |" in (root / "collected.md").read_text()


def test_signals_in_the_middle_of_saves(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, uninterrupted: list[float]
) -> None:
    """A save after every step. Slurm signals the steps alone, as ``--signal=USR1@60`` asks, then all there is."""
    monkeypatch.setenv("MEGATRON_FLUX_PREFLIGHT", "0")
    words = ["--set", f"steps={STEPS}", "--set", "save_interval=1", "--set", "save_keep=2"]
    job, _, root = submit(slurm, "flux", *words)
    saved = root / "rep-0" / "checkpoints"
    reached = 0
    for restarts, how in (("1", []), ("2", ["--full"])):
        at_the_cluster.wait(lambda past=reached: recorded(root, "flux") >= past + 3, "some saves", 300)
        at_the_cluster.wait(lambda: list(saved.glob("*.partial/*.distcp")), "another save")
        at_the_cluster.client("scancel", "--signal=USR1", *how, job)
        at_the_cluster.wait(lambda past=restarts: at_the_cluster.job(job)["Restarts"] == past, "requeueing", 120)
        reached = recorded(root, "flux")
        assert int((saved / "latest_checkpointed_iteration.txt").read_text()) == reached < STEPS
        at_the_cluster.release(job)
    at_the_cluster.wait_for_job(job)
    assert "requeue 2 of at most 3" in "\n".join(log_of(at_the_cluster, job))
    assert losses(root, "flux") == uninterrupted
    assert not list(saved.glob("*.partial"))


def test_requeues_are_bounded(at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With none allowed: the job that is asked to stop before it trains fails and says so."""
    Path("slow").write_text("#!/usr/bin/env bash\nsleep 60\n")
    Path("slow").chmod(0o755)
    monkeypatch.setenv("MEGATRON_FLUX_PYTHON", str(Path("slow").absolute()))
    own = Profile.packaged()["local"]
    Path("own.yaml").write_text(f"{own}\nmax_requeues: 0\n")
    said = slurm("submit", "--profile", "own.yaml", "--job", "tiny", "--mode", "flux")
    job = re.search(r"job (\d+)", said)[1]
    at_the_cluster.wait(lambda: at_the_cluster.job(job)["JobState"] == "RUNNING", "the job to run")
    at_the_cluster.wait(lambda: "pre-flight" in "\n".join(log_of(at_the_cluster, job)), "the pre-flight")
    at_the_cluster.client("scancel", "--batch", "--signal=USR1", job)
    at_the_cluster.wait_for_job(job, ("FAILED",))
    assert "not requeued: this job has been 0 time(s), and 0 is the limit" in log_of(at_the_cluster, job)[-1]


def test_a_bad_node_is_named_before_training(at_the_cluster: Cluster, slurm: Slurm) -> None:
    """This machine has no GPUs, so every node is bad for a profile with eight."""
    words = ["--profile", "nvlink-h100", "--job", "tiny", "--nodes", "2", "--tp", "8", "--mode", "flux"]
    job = re.search(r"job (\d+)", slurm("submit", *words))[1]
    at_the_cluster.wait_for_job(job, ("FAILED",))
    said = log_of(at_the_cluster, job)
    assert {line.split(":")[0] for line in said if line.endswith(": 0 GPU(s), the profile says 8")} == {"n00", "n01"}
    assert "error: pre-flight stopped the job: n00: " in said[-1]
    assert "sbatch --exclude=NODE" in said[-1]
    assert not any("training" in line for line in said)


def test_a_network_below_its_floor_stops_the_job(at_the_cluster: Cluster, slurm: Slurm) -> None:
    """gloo over the loopback reaches no terabytes: what NCCL over TCP is to InfiniBand."""
    own = Profile.packaged()["local"]
    own = own.replace("processes_per_node: 1", "processes_per_node: 2")
    own += "preflight:\n  floors:\n    node_gbps: 1.0e+6\n    network_gbps: 2.0e+6\n"
    Path("own.yaml").write_text(own + "    waived: {node_bandwidth: 'memory is $(slow) \"here\"'}\n")
    job = re.search(r"job (\d+)", slurm("submit", "--profile", "own.yaml", "--job", "tiny", "--mode", "flux"))[1]
    at_the_cluster.wait_for_job(job, ("FAILED",))
    said = log_of(at_the_cluster, job)
    first, second = at_the_cluster.hosts(job)
    pair = f"error: pre-flight stopped the job: {first} with {second}: "
    found = re.search(pair + r"(\S+) GB/s \(bus\) in all_reduce, ", said[-1])
    assert found, said[-1]
    assert 0 < float(found[1]) < 1000
    assert "the profile's floor is 2e+06; NCCL may have fallen back to TCP" in said[-1]
    assert "(rule network_bandwidth)" in said[-1]
    assert not any("training" in line for line in said)
    (log,) = Path("runs").glob(f"tiny-flux-{job}/rep-0/logs/0/preflight-together-0-{first}.log")
    notes = [line for line in log.read_text().splitlines() if "rule node_bandwidth is waived" in line]
    assert len(notes) == 4, "two nodes, two collectives"
    assert all(line.endswith('(rule node_bandwidth is waived: memory is $(slow) "here")') for line in notes)
