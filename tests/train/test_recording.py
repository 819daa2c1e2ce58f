"""Files of a run: killed, resumed, sampled, profiled and mirrored, without a secret in any file."""

import glob
import gzip
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.train.checkpoint_folder import checkpoint_of, damage, tracked
from tests import documented
from tests.train.conftest import SMALL, records, running

pytestmark = pytest.mark.slow

SECRETS = {
    "WANDB_API_KEY": "0123456789" * 4,
    "HF_TOKEN": "hf_notToBeFoundAnywhere",
    "DATABASE_PASSWORD": "correct-horse-battery",
    "SOME_VARIABLE": "value-of-a-variable",
}
JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "night-run", "SLURM_RESTART_COUNT": "1"}
COMMON = [*SMALL, "--wandb", "offline", "--set", "wandb_tags=night"]
COMMON += ["--set", "sample_interval=2", "--save-interval", "3", "--set", "log_interval=1"]


def words(python: str, corpus: Path, folder: Path, *more: str) -> list[str]:
    run = [python, "-m", "megatron_flux.cli", "train", "--data", str(corpus), "--out", str(folder / "run")]
    return [*run, *COMMON, "--save", str(folder / "checkpoints"), *more]


def test_a_killed_run_loses_nothing_and_is_resumed(
    warm_python: str, environment: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    flux, saved = tmp_path / "run" / "flux", tmp_path / "checkpoints"
    log, command = tmp_path / "log.txt", words(warm_python, corpus, tmp_path, "--steps", "100000")
    started: list[str] = []

    def in_a_later_save() -> bool:
        if tracked(saved) is None:
            return False
        started[:] = started or ranks()
        return bool(glob.glob(f"{saved}/*.partial/*.distcp"))  # Path.glob raises when a folder goes while it looks

    def ranks() -> list[str]:
        asked = ["pgrep", "-f", f"train.worker {tmp_path}"]
        return subprocess.run(asked, capture_output=True, text=True).stdout.split()

    with running(command, {**environment, **SECRETS}, in_a_later_save, log) as process:
        rank_0, _ = started
        os.kill(int(rank_0), signal.SIGKILL)
        assert process.wait(120) == 1
        assert ranks() == []
    resumed = tracked(saved)
    assert damage(checkpoint_of(saved, resumed)) is None, "what a save had not written is no checkpoint"
    last = log.read_text().strip().splitlines()[-1]
    assert "rank 0 was killed by SIGKILL" in last
    assert str(tmp_path / "run") in last
    said = [int(step) for step in re.findall(r"step (\d+)/", log.read_text())]
    written = [record["iteration"] for record in records(flux)]
    assert written == list(range(1, len(written) + 1))
    assert written[-1] >= said[-1], "a step that was said to be done is not in the record"
    first = json.loads((flux / "wandb.json").read_text())["id"]

    # As after a requeue: from the latest checkpoint, mostly before the last recorded step, into the same folder.
    assert resumed <= written[-1]
    profiled = f"{resumed + 3}-{resumed + 4}"
    steps = ["--steps", str(resumed + 6), "--load", str(saved), "--profile-steps", profiled]
    done = subprocess.run(
        words(warm_python, corpus, tmp_path, *steps),
        capture_output=True,
        text=True,
        timeout=600,
        env={**environment, **SECRETS, **JOB},
    )
    assert done.returncode == 0, done.stderr
    rows = records(flux)
    assert [row["iteration"] for row in rows] == list(range(1, resumed + 7))
    check_process(rows, resumed, first)
    assert len(list((flux / "wandb").glob(f"offline-run-*/run-{first}.wandb"))) == 2, "one run, gone on with"
    check_trace(flux, resumed + 3, resumed + 4, rows)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for secret in SECRETS.values():
        assert [path for path in files if secret.encode() in content(path)] == [], secret
    assert all(secret not in done.stdout + done.stderr for secret in SECRETS.values())


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def check_process(rows: list[dict[str, Any]], resumed: int, wandb_id: str) -> None:
    """The first record of each process says what ran."""
    about = {row["iteration"]: row["flux/run"] for row in rows if "flux/run" in row}
    assert list(about) == [1, resumed + 1]
    before, after = about[1], about[resumed + 1]
    assert set(before) == documented.fields("run").keys()
    assert (before["resumed_from"], after["resumed_from"]) == (None, resumed)
    assert before["wandb_id"] == after["wandb_id"] == wandb_id
    assert (before["job"], after["job"]) == (None, {"id": "4711", "name": "night-run", "restart": "1"})
    assert (after["ranks"], len(after["nodes"]), after["sample_interval"]) == (2, 1, 2)
    assert after["node_of_rank"] == [0, 0]
    assert after["versions"]["megatron-core"]
    assert after["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert after["peak_tflops"] is None
    assert after["peak_source"].startswith("no MFU: ")


def check_trace(flux: Path, first: int, last: int, rows: list[dict[str, Any]]) -> None:
    """One trace per rank, with the operators by name."""
    slowed = [row["iteration"] for row in rows if row.get("profiled")]
    assert slowed == [first - 1, first, last]
    for rank in (0, 1):
        trace = json.loads(content(flux / "trace" / f"rank{rank:05d}.json.gz"))
        names = [str(event.get("name")) for event in trace["traceEvents"]]
        assert [n for n in names if n.startswith("flux::step")] == [f"flux::step {first}", f"flux::step {last}"]
        calls = [n for n in names if n.startswith("flux::all_gather_gemm") and n.endswith("reference")]
        assert len(calls) == 2 * (3 + 2)
        assert all(f"tp=2 rank={rank} " in name for name in calls)
        assert names.count("flux::optimizer") == 2
    assert not (flux / "breakdown.json").exists(), "only a GPU's time is divided"
