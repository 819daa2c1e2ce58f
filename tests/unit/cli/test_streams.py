"""The command in a process whose streams, signals and encoding are not what one expects."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CLI = [sys.executable, "-m", "megatron_flux.cli"]


@pytest.mark.parametrize(
    ("redirected", "words", "code"),
    [(">&-", "--version", 0), ("2>/dev/full", "no-such-command", 2), ("<&- >&- 2>&-", "no-such-command", 2)],
)
def test_streams_that_are_closed_or_full_end_nothing(redirected: str, words: str, code: int) -> None:
    assert subprocess.run(["sh", "-c", f'"$@" {redirected}', "sh", *CLI, words]).returncode == code


def test_an_encoding_that_torch_cannot_live_with() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([*CLI, "doctor"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("set PYTHONUTF8=1\n")


def test_ctrl_c_while_it_is_imported_is_no_traceback() -> None:
    command = [sys.executable, "-c", "import megatron_flux_autoload; megatron_flux_autoload.main()", "doctor"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == -signal.SIGINT
