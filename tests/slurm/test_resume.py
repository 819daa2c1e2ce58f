"""Jobs that failed go on: by themselves without the bad node, or when they are told to."""

import json
import re
from pathlib import Path

import pytest

from megatron_flux.slurm import queue
from tests.executable import executable
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Slurm

# Records five steps and saves where a file `saves` is. Then it fails on the job's second node as the file `fails` says:
# `always` or `once` (not after a requeue), in which repetition, with which account. Otherwise it finishes.
STAND_IN = r"""#!/usr/bin/env bash
for word in "$@"; do
    [[ $word == --out=* ]] && out=${word#--out=}
    [[ $word == --save=* ]] && save=${word#--save=}
    [[ $word == --load=* ]] && echo "$SLURM_JOB_ID" >>"$SLURM_SUBMIT_DIR/loaded-${SLURM_ARRAY_TASK_ID:-0}"
done
[[ -n ${out-} ]] || exit 0
if [[ $SLURM_NODEID == 0 ]]; then
    mkdir -p "$out/flux" "$out/baseline" "$save/flux" "$save/baseline"
    echo '{"config": {"steps": 5}}' >"$out/config.json"
    for variant in flux baseline; do
        sed 's/"iteration": 1,/"iteration": 5,/' "$SLURM_SUBMIT_DIR/record" >"$out/$variant/metrics.jsonl"
    done
    for folder in "$save" "$save/flux" "$save/baseline"; do
        [[ ! -e $SLURM_SUBMIT_DIR/saves ]] || echo 3 >"$folder/latest_checkpointed_iteration.txt"
    done
fi
read -r when repetition said <"$SLURM_SUBMIT_DIR/fails"
[[ $when != once || ${SLURM_RESTART_COUNT:-0} == 0 ]] || when=never
if [[ $when != never && $repetition == "${SLURM_ARRAY_TASK_ID:-0}" ]]; then
    both=$SLURM_SUBMIT_DIR/began-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    if [[ $SLURM_NODEID == 0 ]]; then
        touch "$both"
        exec sleep 60
    fi
    until [[ -e $both ]]; do sleep 0.1; done
    echo "0 0 rank 1 on $SLURMD_NODENAME $said" >"$MEGATRON_FLUX_FAILURES/$SLURMD_NODENAME"
    exit 1
fi
[[ $SLURM_NODEID != 0 ]] || printf '{"state": "finished", "iterations": {}}\n' >"$out/ended.json"
"""
KILLED = "was killed by SIGKILL (exit code -9)"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_cluster: Cluster) -> None:
    """The stand-in in place of Python, without pre-flight; nothing fails yet."""
    from tests.unit.metrics.metrics_records import record

    (tmp_path / "record").write_text(json.dumps(record(iteration=1)) + "\n")
    (tmp_path / "fails").write_text("never 0 -\n")
    monkeypatch.setenv("MEGATRON_FLUX_PYTHON", str(executable(tmp_path / "python-stand-in", STAND_IN)))
    monkeypatch.setenv("MEGATRON_FLUX_PREFLIGHT", "0")


def submit(slurm: Slurm, mode: str, *words: str) -> tuple[str, Path]:
    said = slurm("submit", "--profile", "local", "--job", "tiny", "--mode", mode, *words)
    return re.search(r"job (\d+)", said)[1], Path(re.search(r"folder: (.*)", said)[1])


def left_out(cluster: Cluster, job: str) -> str:
    """The node that a retry leaves out."""
    cluster.wait(lambda: cluster.job(job)["ExcNodeList"] != "(null)", "a node to be left out")
    return cluster.job(job)["ExcNodeList"]


def log_of(cluster: Cluster, job: str) -> str:
    return Path(cluster.job(job)["StdOut"]).read_text()


@pytest.mark.usefixtures("stand_in")
def test_a_failure_that_no_node_causes_is_not_retried_again(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("fails").write_text(f"always 0 {KILLED}\n")
    job, root = submit(slurm, "flux")
    at_the_cluster.wait(lambda: at_the_cluster.job(job)["Restarts"] == "1", "the retry")
    bad = left_out(at_the_cluster, job)
    assert "has not ended, it is " in slurm("resume", root, code=2)
    at_the_cluster.release(job)
    at_the_cluster.wait_for_job(job, ("FAILED",))
    other = at_the_cluster.hosts(job)[1]
    assert other != bad
    *_, before, last = log_of(at_the_cluster, job).strip().splitlines()
    assert before == "megatron-flux: not retried: it has been 1 time(s), and 1 is the limit"
    assert last.startswith(f"megatron-flux: error: rank 1 on {other} {KILLED}; ")
    assert last.endswith(f"{root}/rep-0/logs/1")
    shown = slurm("status", root)
    assert f"tiny-flux job {job}: FAILED" in shown
    assert f"    retried without {bad}\n    cause: rank 1 on {other} {KILLED}; logs in {root}/rep-0/logs/1" in shown

    # By hand, then: not without a checkpoint, unless asked for.
    refused = slurm("resume", root, code=2)
    assert len(refused.strip().splitlines()) == 1
    assert "rep-0 has no checkpoint and would begin anew at step 0; give --from-start" in refused
    assert "it would stop at once; give --time 2" in slurm("resume", root, "--time", "1", code=2)
    Path("fails").write_text("never 0 -\n")
    tracker = root / "rep-0" / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("3\n")
    words = ["resume", root, "--time", "5", "--exclude", "n00"]
    before = at_the_cluster.jobs()
    assert f" --time=5 --exclude=n00 {root}/job.sbatch" in slurm(*words, "--dry-run")
    waits = f" --exclude=n00 --dependency=afterok:{job} --kill-on-invalid-dep=yes {root}/job.sbatch"
    assert waits in slurm(*words, "--dependency", f"afterok:{job}", "--dry-run")
    assert at_the_cluster.jobs() == before
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    with monkeypatch.context() as patched:
        patched.chdir(elsewhere)  # where a job was submitted, it goes on
        said = slurm(*words)
    again = re.search(r"job (\d+): rep-0 goes on from step 3\n", said)[1]
    at_the_cluster.wait_for_job(again)
    found = at_the_cluster.job(again)
    assert (found["TimeLimit"], found["ExcNodeList"]) == ("00:05:00", "n00")
    assert Path("loaded-0").read_text().split()[-1] == again
    assert f"job {job}, resumed as {again}: COMPLETED" in slurm("status", root)
    assert "ended: all steps done, step baseline 5/5, flux 5/5, 3 start(s)" in slurm("status", root)
    assert [path.name for path in Path("runs").glob("tiny-*")] == [root.name]


@pytest.mark.usefixtures("stand_in")
def test_a_job_that_was_cancelled_before_it_began(
    at_the_cluster: Cluster, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that sbatch alone submitted, to a partition of its own: the script leaves what a resume needs."""
    Path("fails").write_text(f"always 0 {KILLED}\n")
    Path("saves").touch()
    script = Path("own.sbatch")
    slurm("render", "--profile", "local", "--job", "tiny", "--mode", "flux", "--set", "retries=0", "--out", script)
    monkeypatch.setenv(*queue.LIBRARY)  # the script is no checkout's, and the stand-in has no package
    own = at_the_cluster.client("sbatch", "--parsable", "--partition=other", script).stdout.strip()
    at_the_cluster.wait_for_job(own, ("FAILED",))
    root = Path("runs").absolute() / f"tiny-flux-{own}"
    assert re.search("not retried: .* 0 time.* 0 is the limit", log_of(at_the_cluster, own))
    Path("fails").write_text("never 0 -\n")
    again = re.search(r"job (\d+): rep-0 goes on from step 3\n", slurm("resume", root))[1]
    at_the_cluster.wait_for_job(again)
    assert at_the_cluster.job(again)["Partition"] == "other"

    said = slurm("submit", "--profile", "local", "--job", "tiny", "--mode", "flux", "--nodes", "16")
    job = re.search(r"job (\d+)", said)[1]
    root = Path(re.search(r"folder: (.*)", said)[1])
    at_the_cluster.client("scancel", job)
    at_the_cluster.wait_for_job(job, ("CANCELLED",))
    assert "rep-0 begins" in slurm("resume", root, "--dry-run"), "nothing was recorded, so nothing can be lost"
