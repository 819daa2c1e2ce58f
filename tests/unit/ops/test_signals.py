"""Signal handlers of the program outlive what happens while Triton compiles: a thief in C, other threads, Python's own
changes. A real compile, whose triton may be a thief itself: tests/unit/kernels/test_compiled.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import megatron_flux
from megatron_flux.kernels.signals import kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")

TAKEN = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
SIG_IGN = 1


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that a Python handler is called for, as they come."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in TAKEN}
    yield came
    for number, handler in before.items():
        signal.signal(number, handler)


def steal(*numbers: int, into: int = SIG_IGN) -> None:
    """Change handlers in the C library, behind Python's back, as LLVM does."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    for number in numbers:
        libc.signal(number, into)


def send(numbers: tuple[int, ...] = TAKEN) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def ignored(number: int) -> bool:
    found = re.search(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    assert found is not None
    return bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_stolen_in_any_thread_are_put_back(heard: list[int], fails: bool) -> None:
    def compiles() -> None:
        with kept:
            steal(*TAKEN)
            send()
            assert heard == [], "nothing was stolen"
            if fails:
                raise RuntimeError("no kernel")

    with ThreadPoolExecutor(1) as threads:
        error = threads.submit(compiles).exception()
    assert str(error) == ("no kernel" if fails else "None")
    send()
    assert heard == list(TAKEN)


def test_signals_that_are_ignored_stay_ignored(heard: list[int]) -> None:
    """Python ignores SIGPIPE so: an error is raised, where the default would end the process."""
    python_ignores = (signal.SIGPIPE, signal.SIGXFSZ)
    assert all(map(ignored, python_ignores))
    with kept:
        steal(*python_ignores, into=ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value)
        assert not any(map(ignored, python_ignores))
    assert all(map(ignored, python_ignores))


def test_what_python_changes_meanwhile_stays(heard: list[int]) -> None:
    with kept:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as a handler may
        signal.signal(signal.SIGTERM, lambda *_: heard.append(0))
    send((signal.SIGUSR1, signal.SIGTERM))
    assert heard == [0]
    assert ignored(signal.SIGUSR1)
    with kept:
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    send((signal.SIGUSR1,))
    assert heard == [0, signal.SIGUSR1]


def test_no_kernel_is_launched_but_by_what_keeps_handlers() -> None:
    """``kernel[grid](...)`` stands in one place; a warm cache or another triton would hide a second one."""
    package = Path(megatron_flux.__file__).parent
    launches = {
        (str(file.relative_to(package)), match[0])
        for file in package.rglob("*.py")
        for match in re.finditer(r"\w*kernel\[.+?\](?=\()", file.read_text())
    }
    assert launches == {("kernels/launch.py", "kernel[(grid,)]")}
