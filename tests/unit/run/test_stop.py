"""Stop requests: the note of a signal, by this rank and by what it starts."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megatron_flux.run.stop import StopRequest


@pytest.fixture(autouse=True)
def handlers_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def hears(stop: StopRequest) -> bool:
    """Return True if it notes the signal, which may take another thread to wake up."""
    deadline = time.monotonic() + 10
    while not stop.noted() and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic() < deadline


def test_after_the_run_the_signal_is_harmless() -> None:
    """It is sent again until the process is gone, and Python's own end puts handlers back to what kills."""
    with StopRequest(torch.device("cpu")) as stop:
        assert signal.getsignal(signal.SIGUSR1) == stop._note
        os.kill(os.getpid(), signal.SIGUSR1)
        assert hears(stop)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("later", [False, True], ids=["listening", "asked"])
def test_what_a_rank_starts_outlives_the_signal(later: bool) -> None:
    """Slurm signals every process of a step: a compiler that dies of it takes its rank along."""
    begun: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        begun.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

    with StopRequest(torch.device("cpu")) as stop:
        if later:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert hears(stop)
        begin()
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    begin()  # the last report is under way
    assert len(begun) == 3
    for process in begun:
        process.send_signal(signal.SIGUSR1)
        process.communicate()
        assert process.returncode == 0
