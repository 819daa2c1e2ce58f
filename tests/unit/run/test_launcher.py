"""How many ranks a command starts, the signal it passes on to them, and which of several failed ones it names."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_flux.errors import InterruptedRunError, UserError
from megatron_flux.run import launcher
from megatron_flux.run.launcher import failure_of

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("codes", "times", "said"),
    [
        ((1, 1), (20, 10), "rank 1 failed"),
        ((1, -signal.SIGKILL), (10, 20), "rank 1 was killed by SIGKILL (exit code -9)"),  # others missed it
        ((-signal.SIGTERM, 1), (10, 20), "rank 1 failed"),  # the launcher ended the other
        ((2, 2), (0, 0), ""),
    ],
)
def test_the_first_failure_is_named(codes: tuple[int, int], times: tuple[int, int], said: str) -> None:
    failures = {}
    for rank, (code, at) in enumerate(zip(codes, times, strict=True)):
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="<N/A>")
        failures[rank].timestamp = at
    error = failure_of(ChildFailedError("worker", failures), "what was recorded is in runs/x")
    assert isinstance(error, UserError) == (2 in codes), "a refusal stays a refusal"
    assert str(error).startswith(said)
    assert ("runs/x" in str(error)) == (2 not in codes)


@pytest.mark.parametrize(("nproc", "gpus", "expected"), [(None, 0, 2), (None, 4, 4), (3, 0, 3), (2, 4, 2)])
def test_how_many_ranks(nproc: int | None, gpus: int, expected: int) -> None:
    assert launcher.world_size(nproc, gpus=gpus, otherwise=2) == expected


def test_numbers_of_ranks_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--nproc 8 on a machine with 4"):
        launcher.world_size(8, gpus=4, otherwise=2)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert launcher.world_size(None, gpus=0, otherwise=2) == 4
    with pytest.raises(UserError, match="--nproc 2 under a launcher that started 4"):
        launcher.world_size(2, gpus=0, otherwise=2)


RANK = """
import os, pathlib, signal, time

def work(argument):
    out, asked = pathlib.Path(argument), []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    (out / f"ready-{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 60
    while not asked:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (out / f"asked-{os.environ['RANK']}").touch()
    time.sleep(0.0 if "once" in argument else 60.0)
"""


@pytest.mark.parametrize(
    ("folder", "signals", "expected"),
    [
        ("once-term", [signal.SIGTERM], signal.SIGTERM),
        ("twice", [signal.SIGTERM, signal.SIGINT], signal.SIGINT),
    ],
)
def test_the_launcher_passes_signals_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, signals: list[signal.Signals], expected: Any
) -> None:
    (tmp_path / "rank_that_waits.py").write_text(RANK)
    (out := tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = {number: signal.getsignal(number) for number in signals}

    def wait_for(files: str) -> None:
        while len(list(out.glob(files))) < 2:
            time.sleep(0.02)

    def ask() -> None:
        wait_for("ready-*")
        os.kill(os.getpid(), signals[0])
        wait_for("asked-*" if expected is signal.SIGINT else "ready-*")
        for number in signals[1:]:
            os.kill(os.getpid(), number)

    threading.Thread(target=ask, daemon=True).start()
    if expected is signal.SIGINT:
        with pytest.raises(InterruptedRunError, match="stopped by SIGINT; nothing is left"):
            launcher.launch("rank_that_waits", str(out), 2, left="nothing is left", orderly=True)
    else:
        assert launcher.launch("rank_that_waits", str(out), 2, left="", orderly=True) is expected
    assert {file.name for file in out.glob("asked-*")} == {"asked-0", "asked-1"}
    assert "rank_that_waits" not in sys.modules
    assert {number: signal.getsignal(number) for number in signals} == before
