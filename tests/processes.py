"""Finding the processes that something has started, whoever their parent is now: by a word in their environment.

An orphan is no longer a child of anything that a test knows. What a process was started with it passes on to all that
it starts, and Linux shows that of a live process; zombies have none, and are no longer processes.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable

import psutil

MARK = "TESTED_MEGATRON_FLUX"
"""Marks in effect, separated by colons: what is marked may mark in turn. Not called MEGATRON_FLUX_*: some tests clear
those."""


def with_mark(mark: str) -> str:
    """The value of :data:`MARK` for what is started now: marked with ``mark`` besides what this process is."""
    return ":".join([*filter(None, [os.environ.get(MARK)]), mark])


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with ``mark``, without this one and multiprocessing's tracker, which ends with it."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().get(MARK, "").split(":") and not _is_own(process):
                found.append(process)
        except psutil.Error:  # it has just ended, or is another user's
            continue
    return found


def _is_own(process: psutil.Process) -> bool:
    if process.ppid() != os.getpid():
        return process.pid == os.getpid()
    return "".join(process.cmdline()[-1:]).startswith("from multiprocessing.resource_tracker import ")


def left(mark: str, seconds: float) -> list[str]:
    """Return the processes of ``mark`` after so many seconds, as pid and command line; early if there are none."""
    deadline = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.3)  # looking costs a good part of that
    return [_line(process) for process in found]


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until it holds. Fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(mark: str) -> None:
    """Kill what has the mark: the way out of a test that failed."""
    for process in marked(mark):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _line(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200] or process.name()}"
    except psutil.Error:
        return f"{process.pid} (has just ended)"


_ports = random.SystemRandom().sample(range(20000, 32000), 12000)


def free_port() -> int:
    """A port that nobody listens at, another each time. The kernel gives none of these to programs that take any."""
    while True:
        port = _ports.pop()
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port
