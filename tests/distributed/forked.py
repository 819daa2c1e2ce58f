"""Launchers forked from the template of the ranks (:mod:`tests.distributed.pool`), of which tests see what becomes of
their ranks: those are fresh. A fresh launcher would import torch for seconds.
"""

import atexit
import os
import runpy
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context, reduction
from pathlib import Path
from typing import Any

from tests import uncollected
from tests.distributed.pool import MEGATRON

ROOT = Path(__file__).parents[2]


class Forked:
    """``python WORDS`` in such a process: as much of ``subprocess.Popen`` as tests use. It ends of any error."""

    def __init__(self, *words: str, environment: dict[str, str]) -> None:
        """Start it."""
        self._said, its = os.pipe()
        self._text = ""
        context: Any = get_context("forkserver")
        # What is passed on to a process is duplicated as it is pickled.
        self._process = context.Process(target=_become, args=(words, environment, _Passed(its)))
        MEGATRON.start(self._process)
        os.close(its)
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        """As of Popen: negative where a signal has ended it."""
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float) -> int:
        """Wait for its end; return the exit code."""
        self._process.join(timeout)
        assert self.returncode is not None, "it does not end"
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it and all that it has started have ended; return the errors that were written, last of all."""
        for _ in self._parts(timeout):
            pass
        self.wait(timeout)
        return "", self._text

    def until(self, words: str, timeout: float) -> None:
        """Wait until it has written so."""
        parts = self._parts(timeout)
        while words not in self._text:
            assert next(parts, None), self._text

    def _parts(self, timeout: float) -> Iterator[str]:
        deadline = time.monotonic() + timeout
        while self._said >= 0:
            ready, _, _ = select.select([self._said], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"it goes on\n{self._text}"
            part = os.read(self._said, 65536).decode()
            if not part:
                os.close(self._said)
                self._said = -1
                return
            self._text += part
            yield part


class _Passed:
    """A file descriptor, for another process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(passed: Any) -> int:
    return passed.detach()


def _become(words: tuple[str, ...], environment: dict[str, str], said: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(said, 2)
    os.close(said)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of this environment
    os.chdir(ROOT)
    sys.path[:0] = ["" if words[0] == "-c" else str(ROOT)]
    sys.argv = [words[0], *words[2:]]
    uncollected.end()
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
