"""The alarms that the watching thread looks through, while others come and go; how long waits may last."""

import contextlib
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import timeouts as watch


def test_alarms_come_and_go_beside_the_watching_thread() -> None:
    done = threading.Event()

    def come_and_go() -> None:
        kept: list[watch.Alarm] = []
        while not done.is_set():
            alarm = object.__new__(watch.Alarm)  # without a GPU's memory
            alarm.open()
            kept.append(alarm)
            if len(kept) > 2000:
                for old in kept:
                    old.close()
                kept.clear()

    others = threading.Thread(target=come_and_go)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    others.start()
    try:
        for _ in range(1000):
            watch._watched()
    finally:
        sys.setswitchinterval(interval)
        done.set()
        others.join()
    alarm = object.__new__(watch.Alarm)
    alarm.open()
    assert alarm in watch._watched()
    alarm.close()
    assert alarm not in watch._watched()


OUTLIVES = """
import os, sys, time, torch
from types import SimpleNamespace
from megatron_flux.comm import timeouts
timeouts.dist.get_rank = lambda: 0
timeouts.dist.get_process_group_ranks = lambda group: [0, 1]
class Failing(timeouts.Alarm):
    def message(self):
        self._told = True
        1 / 0
class Last(timeouts.Alarm):
    def tell(self):
        os.write(1, b"looked at\\n")
        os._exit(0)
def alarm(kind):
    made = kind(SimpleNamespace(rank=lambda: 0), torch.device("cpu"))
    made.view[:6] = 1, 1, 1, 0, 5, 4
    made.open()
    return made
timeouts._start()
for stderr in (os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), os.open("/dev/full", os.O_RDWR), int(sys.argv[2])):
    os.dup2(stderr, 2)
    kept = [alarm(kind) for kind in (timeouts.Alarm, timeouts.Alarm, Failing)]
    deadline = time.monotonic() + 20
    while not all(one._told for one in kept) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # for the thread that writes
kept = alarm(Last)
time.sleep(20)
"""


def test_the_watching_thread_outlives_what_it_cannot_write(tmp_path: Path) -> None:
    """A file, a full disk, and last a full pipe, in which writing stands still; and looks that fail."""
    file, (reader, writer) = tmp_path / "stderr", os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    words = [sys.executable, "-c", OUTLIVES, str(file), str(writer)]
    environment = {**os.environ, "MEGATRON_FLUX_TIMEOUT_S": "7"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, pass_fds=[writer], timeout=100)
    os.close(reader)
    os.close(writer)
    assert done.stdout == b"looked at\n"
    assert file.read_text().count("all_gather_gemm timed out after 7 s waiting for peer rank 1") == 2, "once each"


@pytest.mark.parametrize("backend", [None, SimpleNamespace(options=SimpleNamespace())], ids=["no backend", "no option"])
def test_a_group_that_does_not_say_its_timeout(
    backend: object, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_FLUX_TIMEOUT_S", raising=False)

    def get_backend(device: torch.device) -> object:
        if backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return backend

    group: Any = SimpleNamespace(_get_backend=get_backend)
    monkeypatch.setattr(watch.constants, "default_pg_nccl_timeout", timedelta(minutes=10))
    assert watch.timeout_s(group, torch.device("cuda")) == 600.0
    assert "does not say its time-out" in caplog.text
    assert "600 s" in caplog.text


def test_a_very_long_timeout_is_still_a_number_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_FLUX_TIMEOUT_S", raising=False)
    options = SimpleNamespace(_timeout=timedelta.max)
    group: Any = SimpleNamespace(rank=lambda: 0, _get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(watch.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watch.dist, "get_process_group_ranks", lambda group: [0, 1])
    assert watch.Alarm(group, torch.device("cpu")).limit == 2**63 - 1
