"""``slurm status`` for jobs that ended, that Slurm has forgotten, and that run and say nothing; and what they found."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.run import folder
from megatron_flux.slurm import queue, status
from megatron_flux.slurm.submit import environment
from tests.executable import executable
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Slurm
from tests.unit.metrics.metrics_records import interleaved, record, write_run

LAST = "slurmstepd: error: *** JOB 7 ON n00 CANCELLED AT 2026-11-22T14:20:05 DUE TO TIME LIMIT ***"


@pytest.fixture
def repetition(tmp_path: Path) -> status.Repetition:
    """Make a job's repetition that has begun twice, and recorded three steps of 2 s in the second start."""
    root = tmp_path / "runs" / "tiny-flux-7"
    for start in ("0", "1"):
        (root / "rep-0" / "logs" / start / "failures" / "train").mkdir(parents=True)
        (root / "rep-0" / "logs" / start / "log").write_text(f"{tmp_path}/tiny-flux-7.log\n")
    (root / "rep-0" / "logs" / "0" / "error").write_text("rank 9 of the first start\n")
    # Slurm's word is not always the last.
    (tmp_path / "tiny-flux-7.log").write_text(
        f"megatron-flux: training\n{LAST}\nsrun: error: n00: task 0: Terminated\n"
    )
    records = [{**record(i, flux=True), "iteration-time": 2.0, "timestamp": time.time()} for i in (1, 2, 3)]
    run = root / "rep-0" / "run"
    with JsonlRecorder(run / "flux" / "metrics.jsonl") as recorder:
        for item in records:
            recorder.write(item)
    (run / "config.json").write_text('{"config": {"steps": 12}}')
    (one,) = status.repetitions(root)
    assert one.logs == root / "rep-0" / "logs" / "1"
    return one


def test_the_cause_is_the_jobs_last_word_or_the_first_failure(repetition: status.Repetition, tmp_path: Path) -> None:
    assert status.cause(repetition) == [f"last line of {tmp_path}/tiny-flux-7.log: {LAST}"]
    # The job has not said it yet: what the nodes' launchers left, by cause and order.
    failures = repetition.logs / "failures" / "train"
    (failures / "n00").write_text("1 0 rank 0 on n00 failed\n")
    (failures / "n01").write_text("0 9 rank 1 on n01 was killed by SIGKILL (exit code -9)\n")
    (failures / "n02").write_text("0 10 rank 2 on n02 was killed by SIGKILL (exit code -9)\n")
    assert status.cause(repetition) == ["cause: rank 1 on n01 was killed by SIGKILL (exit code -9)"]
    (repetition.logs / "error").write_text("rank 1 on n01 was killed; logs in /x\n")
    assert status.cause(repetition) == ["cause: rank 1 on n01 was killed; logs in /x"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (29, "running: last step 29 s ago"),
        (40, "stalled: no new step for 40 s, 20 times the usual 2 s"),
    ],
)
def test_a_run_that_records_nothing_has_stalled(repetition: status.Repetition, seconds: float, said: str) -> None:
    written = (repetition.files.path / "flux" / "metrics.jsonl").stat().st_mtime
    found = status.doing(repetition, written + seconds + 0.01)
    assert found == (f"{said}; see {repetition.logs}" if seconds > 30 else said)
    assert status.doing(replace(repetition, state="finished"), written + 600) is None, "Slurm is only ending it"
    assert status.doing(replace(repetition, logs=None), written + 600) is None, "it has not begun"


def test_states_as_the_accounting_has_them() -> None:
    """Recorded from sacct 22.05.8 with slurmdbd."""
    said = "1_0|COMPLETED|0:0\n1_1|FAILED|3:0\n1_[2-3%1]|PENDING|0:0\n"
    assert queue.accounted_states(said) == {"0": "COMPLETED", "1": "FAILED (exit code 3)", "[2-3%1]": "PENDING"}
    assert queue.accounted_states("2|CANCELLED by 0|0:0\n") == {"": "CANCELLED"}
    assert queue.accounted_states("3|FAILED|0:9\n") == {"": "FAILED (signal 9)"}
    # With --duplicates, or where only completions are noted, a job that was requeued has a line for each start.
    assert queue.accounted_states("4|REQUEUED|0:0\n4|FAILED|1:0\n") == {"": "FAILED (exit code 1)"}
    assert queue.accounted_states("sacct: error: Unknown type ArrayJobId: 2\n") == {}


def test_states_of_real_jobs(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the controller has forgotten is asked of the accounting."""
    submit = ["sbatch", "--parsable", "--output=log"]
    jobs = [at_the_cluster.client(*submit, "--array=0-4%1", "--wrap", "[ $SLURM_ARRAY_TASK_ID = 0 ] || sleep 60")]
    jobs += [at_the_cluster.client(*submit, *words) for words in (["--wrap", "exit 3"], ["--hold", "--wrap", "true"])]
    array, failed, held = (job.stdout.strip() for job in jobs)
    at_the_cluster.wait_for_job(failed, ("FAILED",))
    at_the_cluster.wait(lambda: at_the_cluster.job(f"{array}_1")["JobState"] == "RUNNING", "the array's second task")
    at_the_cluster.wait_for_job(f"{array}_0")
    assert queue.job_states(failed).states == {"": "FAILED"}
    assert queue.job_states(held).states == {"": "PENDING (JobHeldUser)"}
    tasks = queue.job_states(array)
    assert tasks.source == "controller"
    assert tasks.states.pop("1").startswith("RUNNING on n")
    assert tasks.states == {"0": "COMPLETED", "2-4%1": "PENDING (JobArrayTaskLimit)"}
    assert list(tasks.active) == ["2-4%1"]
    assert "sacct" in queue.job_states("999999").source
    root = tmp_path / "runs" / f"tiny-flux-{failed}"
    root.mkdir(parents=True)
    assert slurm("status", root) == f"tiny-flux job {failed}: FAILED\n"
    forget(tmp_path, monkeypatch, "slurm_load_jobs error: Invalid job id specified")
    # This cluster has no database, only a list of completed jobs, which sacct reads too.
    assert slurm("status", root) == f"tiny-flux job {failed}: FAILED (exit code 3) (by sacct)\n"
    unknown = tmp_path / "runs" / "tiny-flux-999999"
    unknown.mkdir()
    said = slurm("status", unknown)
    assert said.startswith("tiny-flux job 999999: no longer known to Slurm (sacct: ")
    assert "Slurm accounting storage is disabled" in said
    assert len(said.splitlines()) == 1


def forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Replace squeue by one whose controller has forgotten the job; a real one remembers it for an hour here."""
    executable(tmp_path / "bin" / "squeue", f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def test_a_controller_that_does_not_answer_has_forgotten_nothing(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    forget(tmp_path, monkeypatch, said)
    root = tmp_path / "runs" / "tiny-flux-7"
    root.mkdir(parents=True)
    assert slurm("status", root) == f"tiny-flux job 7: state unknown: squeue: {said} (exit code 1)\n"
    # It may be running: two jobs in one folder would spoil it.
    assert "Unable to contact" in slurm("resume", root, code=1)


@pytest.mark.parametrize("name", ["it's", 'a"b', "a,b", "'quoted'"])
def test_folders_that_sbatch_would_take_apart_are_refused(name: str, slurm: Slurm, tmp_path: Path) -> None:
    """With a quote in both, the folder that a resumed job goes on in would be a part of the folder of all jobs."""
    said = slurm("submit", "--profile", "local", "--job", "tiny", "--runs", tmp_path / name, "--dry-run", code=2)
    assert "commas, quotes, line breaks and control characters are not allowed" in said
    with pytest.raises(UserError, match="commas, quotes"):
        environment(tmp_path / name, tmp_path / name / "tiny-flux-1")


@pytest.mark.slow
def test_a_job_that_never_began_says_why(at_the_cluster: Cluster, slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()  # what is missing altogether is refused at once
    said = slurm("submit", "--profile", "local", "--job", "tiny", "--mode", "flux", "--venv", str(tmp_path / "gone"))
    number = said.split()[1].strip(":")
    at_the_cluster.wait_for_job(number, ("FAILED",))
    first, second = slurm("status").splitlines()
    assert first == f"tiny-flux job {number}: FAILED"
    log = tmp_path / f"tiny-flux-{number}.log"
    assert second == f"    last line of {log}: megatron-flux: error: no virtual environment {tmp_path / 'gone'}"


INFO = {"config": {"steps": 12}, "link": "nvlink", "versions": {}, "device": {}, "layout": {}, "command": "x"}


def recorded(root: Path, index: int, flux_seconds: float, state: str | None) -> Path:
    run = root / f"rep-{index}" / "run"
    write_run(run, interleaved(4, {"baseline": [0.2] * 4, "flux": [flux_seconds] * 4}), INFO)
    (root / f"rep-{index}" / "logs" / "0").mkdir(parents=True)
    if state is not None:
        folder.write_ended(run, state, {"baseline": 12, "flux": 12})
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "gpt3-175b-compare-4711"


def test_what_repetitions_have_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(root, 0, 0.16, "finished")
    recorded(root, 1, 0.20, "finished")
    recorded(root, 10, 0.10, "finished")
    recorded(root, 2, 0.02, "stopped")
    monkeypatch.setattr(queue, "job_states", lambda job: queue.JobStates(states={}, source="unknown"))
    shown = "\n".join(status.describe(root, 0.0))
    assert "flux 1.25x, no interval: " in shown
    assert f"largest relative loss difference 0; see {root}/rep-0/run/report.html" in shown
    assert "flux 10x" not in shown, "half a run has found nothing"
    assert shown.endswith("speed-up of the 3 finished repetitions: median 1.250 (1.000…2.000)")
