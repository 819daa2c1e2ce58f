"""Values that would like to be commands, in every field: refused, or run without effect and arriving as they are."""

import copy
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.options import validated
from megatron_flux.slurm import job, queue, render
from megatron_flux.slurm.job import Job
from megatron_flux.slurm.profile import Profile
from tests.executable import executable

HOSTILE = (
    "$(touch CANARY)",
    "`touch CANARY`; touch CANARY && touch CANARY #",
    "'; touch CANARY; '",
    '"; touch CANARY; "',
    "a'$(touch CANARY)'b",
    "$IFS",
    "%j\\",
    "*",
    "--wrap=touch CANARY",
    "a\ntouch CANARY",
    "a\n#SBATCH --wrap=x",
    "a\x00b",
)

CLUSTER: dict[str, Any] = {
    **Profile.load("nvlink-h100").model_dump(mode="json"),
    "gpu_request": "gres",
    "sbatch_options": ["--comment=x"],
    "srun_options": ["--network=x"],
    "modules": ["cuda"],
    "container": {"runtime": "apptainer", "image": "image", "mounts": ["/data"]},
    "environment": {"SITE_VARIABLE": "value"},
    "training": {"wandb_project": "x"},
}
"""Every field; set-up lines are run as they are (tests/slurm/test_site.py)."""
WORK: dict[str, Any] = {
    **Job.load("tiny").model_dump(mode="json"),
    "nodes": 1,
    "tp": 8,
    "repetitions": 2,
    "training": {"data_cache": "cache", "data": ["text"]},
    "compare": {"steps": 5},
}
STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >> RECORD/${0##*/}
printf '%s' "${SITE_VARIABLE-}" > RECORD/variable
[[ ${0##*/} == scontrol ]] && echo 'JobId=7 ArrayJobId=7 ArrayTaskId=0 n01 NodeAddr=127.0.0.1'
exit 0
"""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every value and of every key that the user names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
            if path and path[-1] in ("environment", "training", "compare"):
                yield (*path, ("key", key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path


def replaced(values: dict[str, Any], path: tuple[Any, ...], new: str) -> dict[str, Any]:
    values = copy.deepcopy(values)
    place: Any = values
    for step in path[:-1]:
        place = place[step]
    last = path[-1]
    if isinstance(last, tuple):
        place[new] = place.pop(last[1])
    else:
        place[last] = new
    return values


def script(cluster: dict[str, Any], work: dict[str, Any]) -> str:
    resolved = job.resolve(validated(Job, "job", work), validated(Profile, "profile", cluster), "compare")
    return render.job_script(resolved, "a test")


@pytest.fixture
def stubs(tmp_path: Path) -> tuple[Path, Path]:
    """Folders: commands that write down their words, and what they wrote."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    record.mkdir()
    for name in ("srun", "scontrol", "module"):
        executable(folder / name, STUB.replace("RECORD", str(record)))
    return folder, record


def execute(
    text: str, stubs: tuple[Path, Path], where: Path, *words: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm would, as far as it gets."""
    file = stubs[0].parent / "script"
    file.write_text(text)
    environment = {
        **os.environ,
        "PATH": f"{stubs[0]}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(where),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "n01",
        **dict([queue.LIBRARY]),
        **more,
    }
    return subprocess.run(
        ["bash", file, *words], cwd=where, env=environment, capture_output=True, text=True, timeout=60
    )


def run(text: str, stubs: tuple[Path, Path], where: Path, *words: str, **more: str) -> None:
    """Run a script; nothing may have made the canary."""
    done = execute(text, stubs, where, *words, **more)
    assert "left no account" in done.stderr or words, done.stderr
    assert not list(stubs[0].parent.rglob("CANARY")), done.stderr


@pytest.mark.parametrize("value", HOSTILE, ids=[ascii(value) for value in HOSTILE])
def test_each_value_in_each_field(value: str, stubs: tuple[Path, Path], tmp_path: Path) -> None:
    where = tmp_path / "where"
    where.mkdir()
    cluster, work, accepted, refusals = CLUSTER, WORK, [], []
    for base, is_cluster in ((CLUSTER, True), (WORK, False)):
        for path in leaves(base):
            changed = replaced(base, path, value)
            try:
                text = script(changed, WORK) if is_cluster else script(CLUSTER, changed)
            except UserError as error:
                refusals.append(str(error))
                continue
            assert value.isprintable(), path
            # No line of its own, and no directive: everything hostile is inside quotes or a comment.
            assert [x for x in text.splitlines() if x.startswith("#SBATCH") and value in x] == []
            accepted.append(path)
            if is_cluster:
                cluster = replaced(cluster, path, value)
            else:
                work = replaced(work, path, value)
    if value.isprintable():
        wanted = {("description",), ("environment", "SITE_VARIABLE"), ("training", "data", 0), ("gpu", "name")}
        if value == "$IFS":  # nothing would expand it
            wanted -= {("environment", "SITE_VARIABLE"), ("training", "data", 0)}
        assert wanted <= set(accepted)
    assert all("\n" not in refusal for refusal in refusals)
    # All that was accepted, in one script that runs.
    text = script(cluster, work)
    run(text, stubs, where)
    words = (stubs[1] / "srun").read_bytes().decode().split("\0")
    for path in accepted:
        expected = {
            ("gpu", "name"): f"--gpu-name={value}",
            ("training", "data", 0): f"--data={value}",
            ("training", "data_cache"): f"--set=data_cache={value}",
            ("training", "wandb_project"): f"--set=wandb_project={value}",
            ("container", "image"): value,
            ("srun_options", 0): value,
            ("container", "mounts", 0): value,
        }.get(path)
        assert expected is None or expected in words, path
    if ("environment", "SITE_VARIABLE") in accepted:
        assert (stubs[1] / "variable").read_text() == value


@pytest.mark.parametrize("name", ["$(touch CANARY)", "a b'c\"d", "-rf%j*"])
def test_folders_of_any_name(name: str, stubs: tuple[Path, Path], tmp_path: Path) -> None:
    """A profile does not decide where a job is submitted, and where its runs go."""
    where = tmp_path / name
    where.mkdir()
    run(script({**CLUSTER, "container": None, "venv": None}, WORK), stubs, where)
    words = (stubs[1] / "srun").read_bytes().decode().split("\0")
    assert f"--out={where}/runs/tiny-compare-7/rep-0/run" in words
    assert (where / "runs" / "tiny-compare-7" / "rep-0" / "logs" / "0").is_dir()


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD"])
def test_secrets_stay_out_of_scripts(name: str) -> None:
    with pytest.raises(UserError, match="looks like a secret's name") as error:
        script({**CLUSTER, "environment": {name: "hunter2"}}, WORK)
    assert "hunter2" not in str(error.value)
