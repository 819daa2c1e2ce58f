"""Ctrl-C while the command is still being imported."""

import signal
import subprocess
import sys
import time
from pathlib import Path


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
