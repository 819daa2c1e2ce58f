"""A run that Ctrl-C ends in the middle of a save: it is saved, says so, and no process of it is left."""

import glob
import os
import signal
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from megatron_flux.train.checkpoint_folder import tracked
from tests.processes import MARK, end, left, with_mark
from tests.train.conftest import SMALL, UNCOMPILED, records, running

pytestmark = pytest.mark.slow

SECONDS = 60.0
"""Until all have ended. The launcher gives its ranks half of that before it kills them."""


def test_an_interrupted_run_says_so_in_one_line(environment: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    """Ctrl-C in a terminal is a SIGINT for the launcher and no other: the ranks are in sessions of their own.

    The run would take hours and saves all the time, and has saved both sides.
    """
    out, saved, mark = tmp_path / "run", tmp_path / "saved", uuid.uuid4().hex
    words = [
        sys.executable,
        "-m",
        "megatron_flux.cli",
        "compare",
        "--data",
        str(corpus),
        "--out",
        str(out),
        "--save",
        str(saved),
    ]
    words += ["--save-interval", "1", "--set", "save_keep=2", "--wandb", "offline"]
    words += ["--steps", "100000", "--set", "block_steps=1", "--set", "log_interval=100000", *SMALL]
    own = {**environment, MARK: with_mark(mark), **UNCOMPILED}

    def saving_again() -> bool:
        # Not Path.glob, which raises when a folder goes while it looks.
        whole = glob.glob(f"{saved}/*/latest_checkpointed_iteration.txt")
        return len(whole) == 2 and bool(glob.glob(f"{saved}/*/*.partial/*.distcp"))

    log = tmp_path / "log.txt"
    try:
        with running(words, own, saving_again, log) as process:
            ranks = psutil.Process(process.pid).children()
            assert len(ranks) == 2
            assert os.getpgid(process.pid) not in [os.getpgid(rank.pid) for rank in ranks]
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(120) == 128 + signal.SIGINT
            assert left(mark, SECONDS) == []
    finally:
        end(mark)
    errors = log.read_text()
    last = errors.strip().splitlines()[-1]
    assert f"stopped by SIGINT, saved in {saved}; the same command with --load {saved} goes on" in last
    # Every side where it is, on all ranks: nothing that was trained is lost.
    for side in ("baseline", "flux"):
        assert tracked(saved / side) == records(out / side)[-1]["iteration"]
    assert "KeyboardInterrupt" not in errors
