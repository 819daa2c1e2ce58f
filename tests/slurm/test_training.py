"""Real training through the real script on two nodes: stopped and resumed, a node lost, a rank killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import yaml

from megatron_flux.cli.slurm import JobOptions, script
from megatron_flux.metrics.recorder import read_records
from megatron_flux.slurm import submit as submission
from megatron_flux.slurm.profile import Profile
from megatron_flux.slurm.status import describe
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import user_of

pytestmark = pytest.mark.slow

STEPS = 28
# Dropout: a resume that did not restore the random state would show.
SETTINGS = ["num_layers=1", "dropout=0.1", "micro_batch_size=1", "global_batch_size=1", "seq_length=64"]
SETTINGS += ["log_interval=10", "data=text"]
AT_A_TIME = 4


@dataclass(frozen=True)
class Job:
    """A job on nodes of its own."""

    cluster: Cluster
    number: str
    root: Path

    @classmethod
    def submitted(cls, cluster: Cluster, where: range, mode: str, settings: list[str], **environment: str) -> Job:
        """To the nodes ``where``, of the profile ``local`` with this environment besides."""
        local = yaml.safe_load(Profile.packaged()["local"].read_text())
        changed = {**local, "environment": local["environment"] | environment}
        file = Path(f"site-{where[0]}.yaml").absolute()
        file.write_text(yaml.safe_dump(changed))
        others = [name for i, name in enumerate(cluster.nodes) if i not in where]
        words = {"set": [*SETTINGS, *settings], "exclude": ",".join(others)}
        _, text = script(JobOptions(job="tiny", profile=str(file), mode=mode, **words))
        return cls(cluster, *submission.submit(text, Path("runs").absolute()))

    def until(self, condition: Callable[[], Any], what: str) -> None:
        self.cluster.wait(condition, f"{what} of job {self.number}", 400)

    def until_restarted(self, times: int) -> None:
        self.until(lambda: self.cluster.job(self.number)["Restarts"] == str(times), f"start {times}")

    def ended(self, *states: str) -> None:
        self.cluster.wait_for_job(self.number, states or ("COMPLETED",), 400)

    def hosts(self) -> list[str]:
        return self.cluster.hosts(self.number)

    def log(self) -> list[str]:
        file = Path(self.cluster.job(self.number)["StdOut"])
        return file.read_text().strip().splitlines() if file.exists() else []

    def status(self) -> str:
        return "\n".join(describe(self.root, time.time()))

    def recorded(self, variant: str) -> int:
        file = self.root / "rep-0" / "run" / variant / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def losses(self, variant: str) -> list[float]:
        records = read_records(self.root / "rep-0" / "run" / variant / "metrics.jsonl")
        assert [record["iteration"] for record in records] == list(range(1, len(records) + 1))
        return [record["lm loss"] for record in records]

    def ended_as(self) -> dict[str, Any]:
        return json.loads((self.root / "rep-0" / "run" / "ended.json").read_text())

    def tracker(self, variant: str = "") -> Path:
        return self.root / "rep-0" / "checkpoints" / variant / "latest_checkpointed_iteration.txt"

    def rank_process(self, rank: int) -> psutil.Process:
        """Find the process of the rank: its words name the job's folder, its environment the rank."""
        for process in psutil.process_iter():
            try:
                mine = any(word.startswith(f"--out={self.root}/") for word in process.cmdline())
                if mine and process.environ().get("RANK") == str(rank):
                    return process
            except psutil.Error:
                continue
        raise AssertionError(f"rank {rank} is not there")


def compare(cluster: Cluster) -> Job:
    """Saves each variant again and again: nothing of a save may be in the way of the next."""
    settings = [f"steps={STEPS}", "block_steps=2", "save_interval=4", "save_keep=1"]
    job = Job.submitted(cluster, range(2), "compare", settings)
    job.until(job.tracker("flux").exists, "saves of both variants")
    cluster.client("scancel", "--batch", "--signal=USR1", job.number)
    job.until_restarted(1)
    ended = job.ended_as()
    assert ended["state"] == "stopped"
    reached = {variant: job.recorded(variant) for variant in ("baseline", "flux")}
    assert ended["iterations"] == reached
    assert max(reached.values()) < STEPS
    job.until(lambda: cluster.job(job.number)["JobState"] == "PENDING", "requeueing")
    assert "ended: stopped by a signal, step baseline " in job.status()
    cluster.release(job.number)
    job.ended()
    return job


def kill_a_rank_then_cancel_and_resume(cluster: Cluster) -> tuple[Job, list[float]]:
    """And the losses of the steps before anything happened."""
    settings = ["steps=1000000", "save_interval=8", "save_keep=2"]
    job = Job.submitted(cluster, range(7, 10), "baseline", settings, MEGATRON_FLUX_PREFLIGHT="0")
    job.until(lambda: job.recorded("baseline") >= STEPS, "the steps to compare with")
    bad = job.hosts()[1]
    os.kill(job.rank_process(1).pid, signal.SIGKILL)
    job.until_restarted(1)
    said = f"megatron-flux: retry 1 of at most 1, without {bad}: rank 1 on {bad} was killed by SIGKILL (exit code -9)"
    assert said in job.log()
    first = job.losses("baseline")

    cluster.release(job.number)
    resuming = f"megatron-flux: training: --load={job.root}/rep-0/checkpoints; "
    # Once its tasks have begun, Slurm's word is the last: a step that is about to begin aborts, and the script says so.
    job.until(lambda: len(list((job.root / "rep-0" / "logs" / "1").glob("train-*.log"))) == 2, "the retry")
    assert resuming in "\n".join(job.log())
    assert bad not in job.hosts()
    cluster.client("scancel", job.number)
    job.ended("CANCELLED")
    shown = job.status()
    assert f"tiny-baseline job {job.number}: CANCELLED" in shown
    assert "rep-0: not ended, step baseline " in shown
    assert f"    retried without {bad}\n" in shown
    assert re.search(r"    last line of .*: slurmstepd.*CANCELLED AT", shown), shown

    what = submission.resumption(job.root, {}, from_start=False)
    assert re.fullmatch(r"goes on from step \d+", what.begins["0"])
    number = submission.resume(what)
    again = Job(cluster, number, job.root)
    again.until(lambda: job.recorded("baseline") > len(first), "further steps")
    assert resuming in "\n".join(again.log())
    cluster.client("scancel", number)
    again.ended("CANCELLED")
    reached = job.recorded("baseline")
    job.until(lambda: int(job.tracker().read_text()) == reached, "a checkpoint of the last step, before SIGKILL,")
    assert job.ended_as() == {"state": "stopped", "iterations": {"baseline": reached}}
    assert job.losses("baseline")[: len(first)] == first
    assert f"tiny-baseline job {job.number}, resumed as {number}: CANCELLED" in job.status()
    return job, first[:STEPS]


STORIES: list[Callable[[Cluster], Any]] = [kill_a_rank_then_cancel_and_resume, compare]


@pytest.fixture(scope="module")
def stories(
    cluster: Cluster, warm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Any, Future[Any]]]:
    """Run the jobs and return the end of each."""
    folder = tmp_path_factory.mktemp("jobs")
    with user_of(cluster, folder), ThreadPoolExecutor(AT_A_TIME) as pool:
        # user_of takes them away again
        os.environ |= {"MEGATRON_FLUX_CACHE": str(folder / "cache"), "MEGATRON_FLUX_PYTHON": warm_python}
        shutil.copytree(Path(__file__).parent, folder / "text", ignore=shutil.ignore_patterns("__pycache__"))
        try:
            yield {story: pool.submit(story, cluster) for story in STORIES}
        finally:  # where a test was interrupted, some still run
            pool.shutdown(wait=False, cancel_futures=True)
            cluster.given_up.set()
    cluster.given_up.clear()


Stories = dict[Any, Future[Any]]


@pytest.fixture(scope="module")
def uninterrupted(stories: Stories) -> list[float]:
    """Losses of steps that nothing interrupted."""
    return stories[kill_a_rank_then_cancel_and_resume].result()[1]


def test_a_killed_rank_is_named_and_retried_and_a_cancelled_job_resumed(uninterrupted: list[float]) -> None:
    assert len(uninterrupted) == STEPS
    # Steps of one sequence each, on this folder's text: a few are far off (11.7 once, and 3.7 five steps later).
    assert median(uninterrupted[-10:]) < uninterrupted[0] - 0.5, "the loss does not fall"


def test_a_comparison_is_stopped_requeued_and_resumed(stories: Stories, uninterrupted: list[float]) -> None:
    job = stories[compare].result()
    root = job.root
    assert any("requeue 1 of at most 3" in line for line in job.log())
    for variant in ("baseline", "flux"):
        assert job.losses(variant) == uninterrupted, variant
    logs = root / "rep-0" / "logs" / "1"
    assert "[rank 0] megatron-flux: pre-flight: all_reduce of 2 ranks" in "".join(
        file.read_text() for file in logs.glob(f"*-{job.hosts()[0]}.log")
    )
    assert not any("[rank 0] " in file.read_text() for file in logs.glob(f"*-{job.hosts()[1]}.log"))
    preflight = {file.name for file in (logs / "preflight").iterdir()}
    assert preflight == {*(f"{host}.json" for host in job.hosts()), "together.json"}
    shown = job.status()
    assert "rep-0: ended: all steps done, " in shown
    assert "2 start(s)" in shown
    assert "    same losses: largest relative difference 0 over 28 steps; no verdict on speed" in shown
    summary = json.loads((root / "rep-0" / "run" / "summary.json").read_text())
    assert summary["flux_active_layers"] == 5
    assert "plotly" in (root / "rep-0" / "run" / "report.html").read_text()
