"""The command as a process: signals while it starts, and hostile files."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

CLI = [sys.executable, "-m", "megatron_flux.cli"]


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


def test_yaml_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text("[" * 20_000)
    done = subprocess.run(
        [*CLI, "slurm", "render", "--profile", tmp_path / "deep.yaml"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "deep.yaml is not YAML: " in done.stderr
