"""SIGTERM to torchrun, which clusters send half a minute before they kill: real trainings save, and go on elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_flux.train import checkpoint_folder
from tests.processes import MARK, end, left, marked, with_mark
from tests.train.conftest import SMALL, Run, losses, records

pytestmark = pytest.mark.slow

SECONDS = 25.0
"""From the signal to the end of everything; less than torchrun gives its ranks."""
# Dropout: a resume that did not restore the random state would show.
SAME = [*SMALL, "--set", "dropout=0.1", "--set", "lr_decay_steps=1000", "--set", "log_interval=100000"]

Torchrun = Callable[..., "Training"]


class Training:
    """An endless training that torchrun has started."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, mark: str) -> None:
        self.process, self.out, self.saved, self.mark = process, folder / "run", folder / "saved", mark

    def ranks(self) -> list[psutil.Process]:
        """By rank."""
        ranks = [process for process in marked(self.mark) if "RANK" in process.environ()]
        return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))

    def wait(self, condition: Callable[[], object], interval: float = 0.02) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(interval)

    def has_recorded(self, steps: int, side: str = "flux") -> bool:
        file = self.out / side / "metrics.jsonl"
        return file.exists() and file.read_bytes().count(b"\n") >= steps

    def ended(self) -> str:
        """What it said, when it has ended in time."""
        began = time.monotonic()
        _, said = self.process.communicate(timeout=120)
        assert time.monotonic() - began < SECONDS
        assert left(self.mark, SECONDS) == []
        return said

    def is_saved_where_it_was(self, side: str = "") -> int:
        """The step."""
        folder = self.saved / side
        reached = records(self.out / (side or "flux"))[-1]["iteration"]
        assert checkpoint_folder.tracked(folder) == reached
        assert checkpoint_folder.damage(checkpoint_folder.checkpoint_of(folder, reached)) is None
        assert not list(folder.glob("*.partial"))
        return reached


@pytest.fixture
def torchrun(environment: dict[str, str], corpus: Path, warm_python: str, tmp_path: Path) -> Iterator[Torchrun]:
    mark = uuid.uuid4().hex
    started: list[subprocess.Popen[str]] = []

    def start(*words: str | Path, python: str = warm_python, command: str = "train") -> Training:
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words = ("--steps", "100000", *SAME, "--data", corpus, *words)
        words = (*words, "--save", tmp_path / "saved", "--out", tmp_path / "run")
        process = subprocess.Popen(
            [*launch, "-m", "megatron_flux.cli", command, *map(str, words)],
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, MARK: with_mark(mark)},
        )
        started.append(process)
        return Training(process, tmp_path, mark)

    yield start
    end(mark)
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def test_torchrun_is_preempted_and_training_goes_on(torchrun: Torchrun, command: Run, tmp_path: Path) -> None:
    """With Pythons that have begun as a user's do."""
    training = torchrun(python=sys.executable)
    training.wait(lambda: training.has_recorded(4))
    training.process.terminate()
    said = training.ended()
    reached = training.is_saved_where_it_was()
    assert "SIGTERM: the run stops after the step it is at" in said
    assert f"stopped on request: flux at step {reached} of 100000; saved in {training.saved}" in said
    steps = ["--steps", str(reached + 3)]
    go_on = ["--load", training.saved, "--out", training.out]
    done = command("train", *steps, *SAME, *go_on)
    assert f"resumed: flux from step {reached} of {reached + 3}" in done.stderr
    command("train", *steps, *SAME, "--out", tmp_path / "uninterrupted")
    assert losses(training.out / "flux") == losses(tmp_path / "uninterrupted" / "flux")
