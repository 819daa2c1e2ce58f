"""How many ranks a command starts, the signal it passes on to them, and which of several failed ones it names."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_flux.errors import UserError
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
    out = pathlib.Path(argument)
    asked = out / f"asked-{os.environ['RANK']}"
    (out / f"ready-{os.environ['RANK']}").touch()
    time.sleep(0.5)  # as a rank that is still importing
    heard = []  # as a rank whose compiler has the signal when it first comes
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1) or (len(heard) == 2 and asked.touch()))
    deadline = time.monotonic() + 60
    while not asked.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
"""


@pytest.fixture
def handlers_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_the_launcher_passes_the_signal_on_until_its_ranks_have_ended(
    handlers_back: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_that_waits.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def ask() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=ask, daemon=True).start()
    launcher.launch("rank_that_waits", str(tmp_path), 2, left="", pass_on="USR1")
    assert {file.name for file in tmp_path.glob("asked-*")} == {"asked-0", "asked-1"}
    assert "rank_that_waits" not in sys.modules
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
