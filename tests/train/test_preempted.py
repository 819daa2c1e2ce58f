"""SIGTERM to torchrun, which clusters send half a minute before they kill: a training saves, and goes on elsewhere."""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path

import pytest

from megatron_flux.train import checkpoint_folder
from tests.processes import MARK, end, left, with_mark
from tests.train.conftest import SMALL, Run, losses, records, running

pytestmark = pytest.mark.slow

SECONDS = 25.0
"""From the signal to the end of everything; less than torchrun gives its ranks."""
# Dropout: a resume that did not restore the random state would show.
SAME = [*SMALL, "--set", "dropout=0.1", "--set", "lr_decay_steps=1000", "--set", "log_interval=100000"]


def preempted(environment: dict[str, str], *words: str | Path, record: Path) -> str:
    """What an endless training says that torchrun started and a SIGTERM ends after some steps."""
    mark, log = uuid.uuid4().hex, record.parents[2] / "log.txt"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, "-m", "megatron_flux.cli", "train", "--steps", "100000", *words]

    def trained() -> bool:
        return record.exists() and record.read_bytes().count(b"\n") >= 4

    try:
        with running(command, {**environment, MARK: with_mark(mark)}, trained, log) as process:
            process.terminate()
            began = time.monotonic()
            process.wait(120)
            assert time.monotonic() - began < SECONDS
            assert left(mark, SECONDS) == []
            return log.read_text()
    finally:
        end(mark)


def test_torchrun_is_preempted_and_training_goes_on(
    environment: dict[str, str], corpus: Path, command: Run, tmp_path: Path
) -> None:
    out, saved = tmp_path / "run", tmp_path / "saved"
    words = [*SAME, "--data", corpus, "--save", saved, "--out", out]
    said = preempted(environment, *words, record=out / "flux" / "metrics.jsonl")
    reached = records(out / "flux")[-1]["iteration"]
    assert checkpoint_folder.tracked(saved) == reached
    assert checkpoint_folder.damage(checkpoint_folder.checkpoint_of(saved, reached)) is None
    assert not list(saved.glob("*.partial"))
    assert "SIGTERM: the run stops after the step it is at" in said
    assert f"stopped on request: flux at step {reached} of 100000; saved in {saved}" in said
    steps = ["--steps", str(reached + 3)]
    done = command("train", *steps, *SAME, "--load", saved, "--out", out)
    assert f"resumed: flux from step {reached} of {reached + 3}" in done.stderr
    command("train", *steps, *SAME, "--out", tmp_path / "uninterrupted")
    assert losses(out / "flux") == losses(tmp_path / "uninterrupted" / "flux")
