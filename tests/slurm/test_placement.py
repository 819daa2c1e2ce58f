"""The 128-GPU scripts on sixteen real nodes of eight GPUs: accepted, placed, and started as they say."""

import os
import re
import stat
from pathlib import Path

import pytest

from megatron_flux.slurm import queue
from tests.executable import executable
from tests.slurm.cluster import GPUS, NODES, Cluster
from tests.slurm.conftest import SUBMITS_ELSEWHERE, Slurm
from tests.slurm.golden import FOLDER

# Records its words; a training "ends" as MF_ENDS says.
STAND_IN = r"""#!/usr/bin/env bash
work=$SLURM_SUBMIT_DIR/seen
mkdir -p "$work"
what=$(printf '%s\n' "$@" | grep -m 1 -oE 'preflight\.ranks$|preflight\.node$|^tune$|^train$|^compare$')
{
    printf '%s ' "$SLURM_NODEID" "$SLURMD_NODENAME" "${CUDA_VISIBLE_DEVICES-}" "$CUDA_DEVICE_MAX_CONNECTIONS"
    printf '%s ' "$@"
    echo
} > "$work/${SLURM_ARRAY_TASK_ID-0}-$what-$SLURM_NODEID-$SLURM_JOB_ID"
printf '%s\n' "${TRITON_CACHE_DIR-}" "${MEGATRON_FLUX_TUNE_CACHE-}" > "$work/caches-$what-$SLURM_NODEID-$SLURM_JOB_ID"
for word in "$@"; do [[ $word == --folder=* ]] && folder=${word#--folder=}; done
[[ $what != preflight.node ]] || echo {} >"$folder/$SLURMD_NODENAME.json"
if [[ $what == preflight.node && " ${MF_BAD-} " == *" $SLURMD_NODENAME "* ]]; then
    echo "$SLURMD_NODENAME: 7 GPU(s), the profile says 8" >"$folder/$SLURMD_NODENAME.problems"
    exit 1
fi
for word in "$@"; do [[ $word == --out=* ]] && out=${word#--out=}; done
if [[ -n ${out-} && $SLURM_NODEID == 0 ]]; then
    mkdir -p "$out"
    printf '{"state": "finished", "iterations": {}}\n' > "$out/ended.json"
fi
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in in place of Python; the folder of its notes."""
    monkeypatch.setenv("MEGATRON_FLUX_PYTHON", str(executable(tmp_path / "python-stand-in", STAND_IN)))
    return tmp_path / "seen"


def notes(seen: Path, what: str, repetition: int = 0) -> list[list[str]]:
    found = [file.read_text().split() for file in seen.glob(f"{repetition}-{what}-*")]
    return sorted(found, key=lambda words: int(words[0]))


def test_every_script_is_accepted(at_the_cluster: Cluster) -> None:
    for file in sorted(FOLDER.glob("*/*.sbatch")):
        said = queue.slurm("sbatch", "--test-only", str(file))
        assert re.search(r"to start at .* using \d+ processors on nodes? ", said), said
        assert "on nodes n[00-15]" in said


@pytest.mark.usefixtures("inside_another_job")
def test_sixteen_launchers_of_eight_gpus(at_the_cluster: Cluster, stand_in: Path) -> None:
    """And a script that sbatch alone submits is not taken for a task of the array that it was submitted in."""
    link, name = "nvlink", "gpt3-175b"
    job = at_the_cluster.client("sbatch", "--parsable", FOLDER / link / f"{name}-flux.sbatch").stdout.strip()
    at_the_cluster.wait_for_job(job)
    launchers = notes(stand_in, "train")
    assert [words[0] for words in launchers] == [str(i) for i in range(NODES)]
    assert [words[1] for words in launchers] == at_the_cluster.nodes
    assert {words[2] for words in launchers} == {"0,1,2,3,4,5,6,7"}
    assert {words[3] for words in launchers} == {"1"}
    shared = {" ".join(words[4:]) for words in launchers}
    assert len(shared) == 1, "every node is started with the same words"
    said = shared.pop().split()
    port = 10000 + int(job) % 10000 * 2 + 1
    assert said[:2] == ["-m", "megatron_flux.run.node"]
    layout = {f"--nnodes={NODES}", f"--nproc-per-node={GPUS}", "--tp=8", "--pp=8", "--flux", f"--preset={name}"}
    assert layout | {"--master-addr=127.0.0.1", f"--master-port={port}", "--overwrite"} <= set(said)
    assert len(notes(stand_in, "preflight.node")) == len(notes(stand_in, "preflight.ranks")) == NODES
    assert [words[2] for words in notes(stand_in, "tune")] == ["0,1,2,3,4,5,6,7"]
    # Kernels are compiled into a folder of each node and of the job, where the steps before find them again.
    root = Path("runs").absolute() / f"{name}-flux-{job}"
    assert (root / "submitted").read_text().splitlines()[1:] == ["partition=gpus", "account=", "qos="]
    for what in ("train", "preflight.node"):
        caches = [file.read_text().splitlines() for file in stand_in.glob(f"caches-{what}-*")]
        assert {plans for _, plans in caches} == {f"{root}/rep-0/tuned.json"}
        mine = Path("tmp").absolute() / f"megatron-flux-{os.getuid()}"
        assert sorted(kernels for kernels, _ in caches) == [
            f"{mine}/{job}-{node}/triton" for node in at_the_cluster.nodes
        ]
        assert all(Path(kernels).is_dir() for kernels, _ in caches)
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700


@pytest.mark.usefixtures("inside_another_job")
def test_repetitions(at_the_cluster: Cluster, stand_in: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SUBMITS_ELSEWHERE.items():
        monkeypatch.setenv(variable, value)
    said = slurm("submit", "--profile", "nvlink-h100", "--set", "repetitions=2", "--set", "seed=7")
    job, root = re.search(r"job (\d+)", said)[1], Path(re.search(r"folder: (.*)", said)[1])
    assert at_the_cluster.job(f"{job}_1")["Partition"] == "gpus"
    for task in range(2):
        at_the_cluster.wait_for_job(f"{job}_{task}")
    assert root == Path("runs").absolute() / f"gpt3-175b-compare-{job}"
    assert (root / "job.sbatch").is_file()
    for repetition in range(2):
        launchers = notes(stand_in, "compare", repetition)
        assert len(launchers) == NODES
        assert f"--seed={7 + repetition}" in launchers[0]
        assert f"--out={root}/rep-{repetition}/run" in launchers[0]
    shown = slurm("status", root)
    assert f"gpt3-175b-compare job {job}: COMPLETED" in shown
    assert "rep-1: ended: all steps done, nothing recorded, 1 start(s), COMPLETED" in shown


def test_bad_nodes_are_left_out_if_they_are_few(
    at_the_cluster: Cluster, stand_in: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["submit", "--profile", "local", "--job", "tiny", "--tp", "2", "--nodes", "6", "--mode", "flux"]
    monkeypatch.setenv("MF_BAD", "n01 n02")
    many = re.search(r"job (\d+)", slurm(*words))[1]
    found = at_the_cluster.wait_for_job(many, ("FAILED",))
    *_, first, second, last = Path(found["StdOut"]).read_text().splitlines()
    assert (first, second) == tuple(f"n0{i}: 7 GPU(s), the profile says 8" for i in (1, 2))
    assert last.endswith(f"pre-flight stopped the job: {first}; leave bad nodes out with sbatch --exclude=n01,n02")
    monkeypatch.setenv("MF_BAD", "n01")
    said = slurm(*words)
    job, root = re.search(r"job (\d+)", said)[1], Path(re.search(r"folder: (.*)", said)[1])
    at_the_cluster.wait(lambda: at_the_cluster.job(job).get("ExcNodeList") == "n01", "the requeue")
    assert at_the_cluster.job(job)["Restarts"] == "1"
    assert slurm("status", root).count("retried without n01") == 1
