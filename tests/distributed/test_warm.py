"""The warm Python: to whoever starts it, it behaves as a fresh one, and nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest


def begin(python: str, folder: Path, code: str, *words: str) -> subprocess.Popen[str]:
    (folder / "what.py").write_text(code)
    return subprocess.Popen(
        [python, "-u", "-m", "what", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "COLOUR": "green"},
    )


def test_a_fork_has_its_own_streams_folder_environment_and_words(warm_python: str, tmp_path: Path) -> None:
    code = """
import atexit, json, os, sys
atexit.register(print, "the end")
assert "megatron.core" in sys.modules
print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["COLOUR"], sys.stdin.read(), __name__, sys.executable]))
sys.exit("no more")
"""
    out, errors = (process := begin(warm_python, tmp_path, code, "-u", "a b")).communicate("said", timeout=120)
    found, end = out.splitlines()
    assert json.loads(found) == [["-u", "a b"], str(tmp_path), "green", "said", "__main__", warm_python]
    assert (end, errors, process.returncode) == ("the end", "no more\n", 1)


def test_it_ends_as_the_fork_ends_and_passes_signals_on(warm_python: str, tmp_path: Path) -> None:
    for ending, code in (("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("raise ValueError('broken')", 1)):
        process = begin(warm_python, tmp_path, f"import os, sys\n{ending}\n")
        _, errors = process.communicate(timeout=120)
        assert process.returncode == code
        assert errors.endswith("ValueError: broken\n" if code == 1 else "")
    # Python's handler runs between two calls: a signal right before a long one would wait for its end.
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))\nprint('now')\n"
        "while True: time.sleep(0.05)\n"
    )
    process = begin(warm_python, tmp_path, code)
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 5
    process.communicate()


def test_the_fork_ends_with_it(warm_python: str, tmp_path: Path) -> None:
    process = begin(warm_python, tmp_path, "import os, time\nprint(os.getpid())\ntime.sleep(600)\n")
    fork = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    fork.wait(60)


def test_what_the_fork_has_started_ends_with_it_too(warm_python: str, tmp_path: Path) -> None:
    """As a task of Slurm's whose processes are killed: it does not know the forks."""
    (tmp_path / "below.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'below'])\n"
    process = begin(warm_python, tmp_path, code)
    below = psutil.Process(int(process.stdout.readline()))
    process.kill()
    try:
        below.wait(60)
    finally:
        below.kill() if below.is_running() else None
        process.communicate()


def test_in_a_step_of_slurms_a_signal_reaches_what_was_started(
    warm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was started with a signal ignored may yet say what it does on it."""
    (tmp_path / "below.py").write_text("""
import signal, sys, time
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print("now", flush=True)
while True: time.sleep(0.05)
""")
    code = """
import signal, subprocess, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
sys.exit(subprocess.run([sys.executable, "-m", "below"]).returncode)
"""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    process = begin(warm_python, tmp_path, code)
    assert process.stdout.readline() == "now\n", process.communicate()[1]
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 5
    process.communicate()


def test_anything_but_a_module_is_a_fresh_python(warm_python: str) -> None:
    code = "import sys; print(sys.executable, 'torch' in sys.modules)"
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [sys.executable, "False"]
