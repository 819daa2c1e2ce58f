"""What ``slurm status`` says of jobs that ended, that Slurm has forgotten, and that run and say nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megatron_flux.errors import FluxError
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.slurm import queue, status
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Slurm
from tests.unit.metrics.metrics_records import record

LAST = "slurmstepd: error: *** JOB 7 ON n00 CANCELLED AT 2026-11-22T14:20:05 DUE TO TIME LIMIT ***"


@pytest.fixture
def repetition(tmp_path: Path) -> status.Repetition:
    """Of a job that has begun twice, and recorded three steps of 2 s in the second start."""
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


def note(repetition: status.Repetition, rank: int, timestamp: float, error: str) -> None:
    said = {"rank": rank, "host": f"n0{rank}", "iteration": 3, "timestamp": timestamp, "error": error}
    (repetition.run / "flux" / f"failure-rank0000{rank}.json").write_text(json.dumps(said))


def test_the_cause_is_the_jobs_last_word_and_the_first_ranks_note(repetition: status.Repetition) -> None:
    now = time.time()
    note(repetition, 0, now + 9, "RuntimeError: connection lost")
    note(repetition, 1, now + 8, "RuntimeError: out of\nmemory")
    note(repetition, 2, now - 3600, "RuntimeError: of an earlier start")
    (repetition.run / "flux" / "failure-rank00003.json").write_text("{")
    noted = "rank 1 on n01, flux step 3: RuntimeError: out of memory"
    # The job has not said it yet: what the nodes' launchers left, by cause and time.
    failures = repetition.logs / "failures" / "train"
    (failures / "n00").write_text("1 100.5 rank 0 on n00 failed\n")
    (failures / "n01").write_text("0 200.5 rank 1 on n01 was killed by SIGKILL (exit code -9)\n")
    assert status.cause(repetition) == ["cause: rank 1 on n01 was killed by SIGKILL (exit code -9)", noted]
    (repetition.logs / "error").write_text("rank 1 on n01 was killed; logs in /x\n")
    assert status.cause(repetition) == ["cause: rank 1 on n01 was killed; logs in /x", noted]


def test_without_a_word_the_last_line_of_the_log_is_shown(repetition: status.Repetition, tmp_path: Path) -> None:
    assert status.cause(repetition) == [f"last line of {tmp_path}/tiny-flux-7.log: {LAST}"]
    (tmp_path / "tiny-flux-7.log").write_text("one\ntwo\n\n")
    assert status.cause(repetition) == [f"last line of {tmp_path}/tiny-flux-7.log: two"]
    (tmp_path / "tiny-flux-7.log").unlink()
    assert status.cause(repetition) == [f"no cause is on record; see {repetition.logs}"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (5, None),
        (29, None),
        (40, "stale: no record for 40 s, a step usually takes 2 s; see "),
        (600, "stale: no record for 10 min, a step usually takes 2 s; see "),
    ],
)
def test_a_run_that_records_nothing_is_stale(repetition: status.Repetition, seconds: float, said: str | None) -> None:
    written = (repetition.run / "flux" / "metrics.jsonl").stat().st_mtime
    found = status.stale(repetition, written + seconds)
    assert found == (said if said is None else f"{said}{repetition.logs}")


def test_slow_steps_and_a_start_take_their_time(repetition: status.Repetition) -> None:
    file = repetition.run / "flux" / "metrics.jsonl"
    slow = [{**record(i, flux=True), "iteration-time": 60.0, "timestamp": time.time()} for i in (1, 2, 3)]
    file.write_text("".join(json.dumps(one) + "\n" for one in slow))
    assert status.stale(repetition, file.stat().st_mtime + 590) is None
    assert "a step usually takes 60 s" in status.stale(repetition, file.stat().st_mtime + 610)
    # Records of the start before, which a resume writes anew, are no sign of life of this one.
    began = time.time() + 1000
    os.utime(repetition.logs / "log", (began, began))
    os.utime(file, (began + 5, began + 5))
    assert status.stale(repetition, began + 800) is None
    assert status.stale(repetition, began + 1000) == "stale: no record for 17 min since this start"


def test_states_as_the_accounting_has_them() -> None:
    """Recorded from sacct 22.05.8 with slurmdbd."""
    said = "1_0|COMPLETED|0:0\n1_1|FAILED|3:0\n1_[2-3%1]|PENDING|0:0\n"
    assert queue.accounted_states(said) == {"0": "COMPLETED", "1": "FAILED (exit code 3)", "[2-3%1]": "PENDING"}
    assert queue.accounted_states("2|CANCELLED by 0|0:0\n") == {"": "CANCELLED"}
    assert queue.accounted_states("3|FAILED|0:9\n") == {"": "FAILED (signal 9)"}
    # With --duplicates, or where only completions are noted, a job that was requeued has a line for each start.
    assert queue.accounted_states("4|REQUEUED|0:0\n4|FAILED|1:0\n") == {"": "FAILED (exit code 1)"}
    assert queue.accounted_states("sacct: error: Unknown type ArrayJobId: 2\n") == {}


def forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """A controller that answers as one does who has forgotten a job; what it has not forgotten takes an hour here."""
    stub = tmp_path / "bin" / "scontrol"
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}:{os.environ['PATH']}")


INVALID = "slurm_load_jobs error: Invalid job id specified"


def test_what_the_controller_has_forgotten_is_asked_of_the_accounting(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submit = ["sbatch", "--parsable", "--output=log", "--wrap"]
    job = at_the_cluster.client(*submit, "exit 3").stdout.strip()
    at_the_cluster.wait_for_job(job, ("FAILED",))
    root = tmp_path / "runs" / f"tiny-flux-{job}"
    root.mkdir(parents=True)
    assert slurm("status", root) == f"tiny-flux job {job}: FAILED\n"
    forget(tmp_path, monkeypatch, INVALID)
    # This cluster has no database, only a list of completed jobs, which sacct reads too.
    assert slurm("status", root) == f"tiny-flux job {job}: FAILED (exit code 3) (by sacct)\n"
    unknown = tmp_path / "runs" / "tiny-flux-999999"
    unknown.mkdir()
    said = slurm("status", unknown)
    assert said.startswith("tiny-flux job 999999: no longer known to Slurm (sacct: ")
    assert "Slurm accounting storage is disabled" in said
    assert len(said.splitlines()) == 1


def test_a_controller_that_does_not_answer_has_forgotten_nothing(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    forget(tmp_path, monkeypatch, said)
    with pytest.raises(FluxError, match="Unable to contact"):
        queue.known("7")
    root = tmp_path / "runs" / "tiny-flux-7"
    root.mkdir(parents=True)
    assert slurm("status", root) == f"tiny-flux job 7: state unknown: scontrol: {said} (exit code 1)\n"
    # It may be running: two jobs in one folder would spoil it.
    assert "Unable to contact" in slurm("resume", root, code=1)


def test_states_that_may_change() -> None:
    states = {"0": "COMPLETED", "1": "RUNNING on n00", "2": "PENDING (JobArrayTaskLimit)", "3": "CANCELLED"}
    assert list(queue.Known(states=states, source="scontrol").active) == ["1", "2"]
    assert queue.Known(states={"": "COMPLETING"}, source="scontrol").active
    assert not queue.Known(states={"": "RUNNING"}, source="sacct").active, "a job whose end was never noted"


def test_a_job_of_before_has_no_script_to_resume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slurm: Slurm) -> None:
    forget(tmp_path, monkeypatch, INVALID)
    root = tmp_path / "runs" / "tiny-flux-7"
    root.mkdir(parents=True)
    refused = slurm("resume", root, code=2)
    assert f"{root} does not hold job.sbatch and submitted" in refused
    assert f"sbatch --export=ALL,MEGATRON_FLUX_JOB_FOLDER={root}" in refused
    assert "is no folder of a job" in slurm("resume", tmp_path, code=2)
