"""Checkpoints of real runs: stopped, damaged, resumed, and on a disk that is full."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megatron_flux.train import checkpoint_folder
from tests.small_disk import small_disk
from tests.train.conftest import SMALL, Run, losses, records, running

pytestmark = pytest.mark.slow

PLAIN_ADAM = ("--set=distributed_optimizer=false", "--set=dropout=0.1")
"""Its state is saved otherwise. A resumed run draws the numbers that one without an end would have drawn."""


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a command that failed, which has no traceback."""
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def stopped(
    warm_python: str, environment: dict[str, str], corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with ``run`` and ``saved`` of a run that saved every third step, kept two, and was then stopped."""
    root = tmp_path_factory.mktemp("stopped")
    words = [*SMALL, *PLAIN_ADAM, "--steps", "100000", "--save", root / "saved", "--save-interval", "3"]
    words += ["--set", "save_keep=2", "--data", corpus, "--out", root / "run"]
    command = [warm_python, "-m", "megatron_flux.cli", "train", *words]
    log, tracked = root / "log.txt", checkpoint_folder.tracked
    with running(command, environment, lambda: (tracked(root / "saved") or 0) >= 9, log) as process:
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == 0, log.read_text()
    return root


def test_a_stopped_run_keeps_two(stopped: Path) -> None:
    saved = stopped / "saved"
    newest = checkpoint_folder.tracked(saved)
    assert newest == records(stopped / "run" / "flux")[-1]["iteration"]
    assert checkpoint_folder.iterations(saved) == [(newest - 1) // 3 * 3, newest]
    files = {path.name for path in saved.iterdir() if not path.name.startswith("iter_")}
    assert files == {checkpoint_folder.TRACKER, ".megatron_flux.lock"}


def test_a_damaged_checkpoint_is_named_and_an_older_one_resumed(command: Run, stopped: Path, tmp_path: Path) -> None:
    saved = shutil.copytree(stopped / "saved", tmp_path / "saved")
    older, newest = checkpoint_folder.iterations(saved)
    damaged, out = checkpoint_folder.checkpoint_of(saved, newest), tmp_path / "resumed"
    resume = ["train", *SMALL, *PLAIN_ADAM, "--steps", str(newest + 1), "--load", saved, "--save", saved]
    resume += ["--set", "save_keep=2"]

    # torch does not understand it. What it raises is no Exception.
    shard = damaged / "__1_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    said = complaint(command(*resume, "--out", out, code=1))
    advice = "choose an earlier one with --set ckpt_step=N"
    assert re.search(rf"checkpoint {damaged} cannot be loaded: rank \d: \w+Error: .{{,160}}; {advice}", said)
    shutil.rmtree(out)

    # From somebody else who wants to run something. The file has the size that it had.
    index, ran = damaged / ".metadata", tmp_path / "ran"
    planted = f"cpathlib\nPath.touch\n(cpathlib\nPosixPath\n(V{ran}\ntRtR.".encode()
    index.write_bytes(planted + bytes(index.stat().st_size - len(planted)))
    said = command(*resume, "--out", out, code=1).stderr.splitlines()[-1]  # torch logs a traceback
    assert "it names pathlib.Path.touch, which no checkpoint needs" in said
    assert not ran.exists()
    shutil.rmtree(out)

    said = command(*resume, f"--set=ckpt_step={older}", "--save-interval", str(newest), "--out", out).stderr
    assert f"resumed: flux from step {older} of {newest + 1}, out of {saved}" in said
    left = f"records: {out / 'flux' / 'metrics.jsonl'}; next: megatron-flux report {out} makes the report"
    assert said.splitlines()[-1] == f"{left}, and --load {saved} with more --steps goes on"
    assert checkpoint_folder.tracked(saved) == newest + 1
    assert checkpoint_folder.iterations(saved) == [newest, newest + 1]
    assert any(shard.read_bytes()), "the damaged one was not replaced"
    first = {row["iteration"]: row["lm loss"] for row in records(stopped / "run" / "flux")}
    again = {row["iteration"]: row["lm loss"] for row in records(out / "flux")}
    assert [again[n] for n in range(older + 1, newest + 1)] == [first[n] for n in range(older + 1, newest + 1)]


def test_a_full_disk_leaves_the_checkpoints_before(command: Run, tmp_path: Path) -> None:
    """Room for one checkpoint of both sides, and for half of the next."""
    out = tmp_path / "run"
    with small_disk(tmp_path / "disk", 23) as disk:
        saving = ["--save", disk / "saved", "--save-interval", "2", "--set", "block_steps=2"]
        done = command("compare", "--steps", "8", "--set", "warmup_steps=1", *saving, "--out", out, code=1)
        said = complaint(done)
        assert re.search(r"checkpoint \S+iter_0000004 could not be saved: .*\(\S+ GB are free there\)", said)
        assert "resumes from iteration 2 (exit code 1); what was recorded is in" in said
        for side in ("baseline", "flux"):
            folder = disk / "saved" / side
            tracked = checkpoint_folder.tracked(folder)
            assert checkpoint_folder.damage(checkpoint_folder.checkpoint_of(folder, tracked)) is None
            assert not list(folder.glob("*.partial"))
        assert checkpoint_folder.tracked(disk / "saved" / "flux") == 2
        assert len(losses(out / "baseline")) == len(losses(out / "flux")) == 4
