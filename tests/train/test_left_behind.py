"""However a run ends, in the middle of a save or after a hundred: no process of it is left."""

import glob
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_flux.train.checkpoint_folder import checkpoint_of, damage, tracked
from tests.processes import MARK, end, left, with_mark
from tests.train.conftest import SMALL, UNCOMPILED, records, running

pytestmark = pytest.mark.slow

SECONDS = 60.0
"""Until all have ended. The launcher gives its ranks half of that before it kills them."""


@dataclass
class Endless:
    """A comparison that would run for hours and saves all the time, with saves of both sides behind it."""

    process: subprocess.Popen[str]
    out: Path
    mark: str
    log: Path

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it has said, when nothing of it is left."""
        code = self.process.wait(120)
        assert left(self.mark, SECONDS) == []
        return code, self.log.read_text()


@pytest.fixture
def endless(environment: dict[str, str], corpus: Path, tmp_path: Path) -> Iterator[Endless]:
    """One that is in the middle of a save."""
    out, saved, mark = tmp_path / "run", tmp_path / "saved", uuid.uuid4().hex
    words = [sys.executable, "-m", "megatron_flux.cli", "compare", "--data", corpus, "--out", out, "--save", saved]
    words += ["--save-interval", "1", "--set", "save_keep=2", "--wandb", "offline"]
    words += ["--steps", "100000", "--set", "block_steps=1", "--set", "log_interval=100000", *SMALL]
    own = {**environment, MARK: with_mark(mark), **UNCOMPILED}

    def saving_again() -> bool:
        # Not Path.glob, which raises when a folder goes while it looks.
        whole = glob.glob(f"{saved}/*/latest_checkpointed_iteration.txt")
        return len(whole) == 2 and bool(glob.glob(f"{saved}/*/*.partial/*.distcp"))

    log = tmp_path / "log.txt"
    try:
        with running(words, own, saving_again, log, start_new_session=True) as process:  # as a terminal does
            yield Endless(process, out, mark, log)
    finally:
        end(mark)


def test_a_killed_rank_ends_the_run(endless: Endless) -> None:
    rank, _ = endless.ranks()
    rank.kill()
    code, errors = endless.ended()
    assert code == 1
    for side in ("baseline", "flux"):
        saved = endless.out.parent / "saved" / side
        assert damage(checkpoint_of(saved, tracked(saved))) is None, "what a save had not written is no checkpoint"
    assert re.search(r"rank \d was killed by SIGKILL", errors.strip().splitlines()[-1])
    assert str(endless.out) in errors
    assert records(endless.out / "baseline")


def test_an_interrupted_run_says_so_in_one_line(endless: Endless) -> None:
    """Ctrl-C in a terminal is a SIGINT for the launcher and no other: the ranks are in sessions of their own."""
    assert endless.process.pid not in [os.getpgid(rank.pid) for rank in endless.ranks()]
    saved = endless.out.parent / "saved"
    endless.process.send_signal(signal.SIGINT)
    code, errors = endless.ended()
    assert code == 128 + signal.SIGINT
    last = errors.strip().splitlines()[-1]
    assert f"stopped by SIGINT, saved in {saved}; the same command with --load {saved} goes on" in last
    # Every side where it is, on all ranks: nothing that was trained is lost.
    for side in ("baseline", "flux"):
        assert tracked(saved / side) == records(endless.out / side)[-1]["iteration"]
    assert "KeyboardInterrupt" not in errors
