"""The check at the end of every test session, in sessions of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEST = """
import multiprocessing
import subprocess

def test_something():
    multiprocessing.get_context("spawn").Semaphore()  # starts a tracker, which ends with the session
    # With the session's own streams, whoever reads them would wait for it.
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=nothing, stderr=nothing)
    print("pid", process.pid)
    {end}
"""


@pytest.mark.parametrize("ended", [True, False])
def test_a_session_that_leaves_a_process_fails_and_names_it(tmp_path: Path, ended: bool) -> None:
    (tmp_path / "test_it.py").write_text(TEST.format(end="process.kill()" if ended else ""))
    (tmp_path / "conftest.py").write_text(
        "import tests.left_behind as plugin\nplugin.SECONDS = 1.0\nfrom tests.left_behind import *\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_it.py"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    pid = int(done.stdout.split("pid ")[1].split()[0])
    try:
        assert done.returncode == (0 if ended else 1), done.stdout
        assert "1 passed" in done.stdout
        assert (f"{pid} sleep 60" in done.stdout) is not ended
    finally:
        if not ended:
            os.kill(pid, signal.SIGKILL)
