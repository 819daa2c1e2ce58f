"""The launcher, with work that is neither training nor a benchmark: it starts ranks, and says how they failed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_flux.run.rank import WholeErrorFile
from tests.processes import MARK, end, left, until, with_mark
from tests.train.conftest import UNCOMPILED

LAUNCH = ("-m", "tests.distributed.launch")
ROOT = Path(__file__).parents[2]


def environment_of(**more: str) -> dict[str, str]:
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_DEVICE_MAX_CONNECTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return {**environment, **UNCOMPILED, "PYTHONPATH": path, **more}


def begin(python: str, *words: str, **more: str) -> subprocess.Popen[str]:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([python, *words], text=True, cwd=ROOT, env=environment_of(**more), **pipes)


def launch(python: str, *arguments: str) -> tuple[int, str]:
    process = begin(python, *LAUNCH, *arguments)
    said, _ = process.communicate(timeout=300)
    return process.returncode, said.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("refuse", "UserError three is not even"),
        ("fail", "FluxError rank 1 failed: RuntimeError: broke (exit code 1); the rest is in the attic"),
        ("die", "FluxError rank 1 was killed by SIGKILL (exit code -9); the rest is in the attic"),
    ],
)
def test_a_failure_is_one_line_and_ends_the_others(warm_python: str, what: str, said: str) -> None:
    began = time.monotonic()
    assert launch(warm_python, what) == (1, said)
    assert time.monotonic() - began < 120


NODE = """
import sys
from megatron_flux.run import node

node.LOOK_S = 0.1
stops = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
sys.exit(node.main(["--standalone", "--nproc-per-node=1", "--no-python", *stops]))
"""


def states(pid: int) -> list[str]:
    """The states of the process's children; some of an import are gone as soon as they are seen."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(child.status())
    return found


def test_a_stopped_rank_is_noted_when_another_node_has_failed(tmp_path: Path) -> None:
    """Slurm ends the step then: the launcher of the rank that the others waited for gets SIGTERM."""
    (tmp_path / "n00").write_text("3 0 rank 0 on n00 failed: RuntimeError: Timed out\n")
    mark, notes = uuid.uuid4().hex, tmp_path / "n01.silent"
    more = {MARK: with_mark(mark), "MEGATRON_FLUX_FAILURES": str(tmp_path), "SLURMD_NODENAME": "n01"}
    process = begin(sys.executable, "-c", NODE, **more)
    try:
        until(lambda: psutil.STATUS_STOPPED in states(process.pid))
        time.sleep(1)
        process.terminate()
        until(lambda: notes.exists() and notes.read_text())
        assert notes.read_text() == "2 1 rank 0 on n01 gave no answer, its process: stopped\n"
    finally:
        end(mark)
        process.communicate(timeout=60)


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed_as_they_start() -> None:
    """Before they have asked the kernel to tell them: they are still importing."""
    mark = uuid.uuid4().hex
    process = begin(sys.executable, *LAUNCH, "sleep", **{MARK: with_mark(mark)})
    try:
        until(lambda: len(psutil.Process(process.pid).children()) == 2)
        process.kill()
        assert left(mark, 120) == []
    finally:
        end(mark)
        process.communicate(timeout=60)


def test_an_error_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def cut_off(*_: object) -> None:
        (tmp_path / "error.json.part").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(json, "dump", cut_off)
        with pytest.raises(KeyboardInterrupt):
            WholeErrorFile().record_exception(ValueError("no"))
    assert not file.exists()
    WholeErrorFile().record_exception(ValueError("no"))
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: no"


RANK = """
import os
from megatron_flux.run import rank

for launcher in {launchers}:
    if (process := os.fork()) == 0:
        os.environ["MEGATRON_FLUX_LAUNCHER"] = str(launcher)
        rank.end_with_parent()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def test_a_rank_ends_with_the_launcher_that_is_gone(warm_python: str, tmp_path: Path) -> None:
    """One that lives launched something else, of which this rank's own launcher was started."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    program = tmp_path / "rank.py"
    program.write_text(RANK.format(launchers=[os.getpid(), gone.pid]))
    process = begin(warm_python, str(program))
    assert process.communicate(timeout=120)[0].split() == ["0", str(-signal.SIGTERM)]
