"""Keep the program's signal handlers while Triton compiles.

LLVM, inside Triton (seen with 3.6 and 3.9), takes signals over in the C library when a process first compiles a kernel
that is not in Triton's cache, and Python does not notice: ``signal.getsignal`` still shows the handler that is called
no longer. From then on a SIGUSR1 is swallowed; on any of the others LLVM restores the handlers from before that
compile, which undoes what the program has set since, and sends itself the signal again. This module restores what a
compile has changed. During a compile (seconds) a SIGUSR1 can still be lost: the sender must send it again.

Signals: those that programs handle, or ignore, as Python does with SIGPIPE and SIGXFSZ. Not those of faults (SIGSEGV,
SIGABRT and so on): Triton has them during a compile, to report where it crashed, and gives them back itself.

Hazards
    * Compiles happen in autograd's threads, where Python refuses ``signal.signal``, and in several at a time: one that
      begins while another has already lost the handlers must not keep the thief's. They share what the first one saw.
    * A handler may itself call ``signal.signal`` during a compile. That stays.
    * One compile is no reason not to look at the next: LLVM begins anew after a signal that it has handled.

Cost: 12 us each time (one core of a virtual AMD EPYC), which calls by a cached plan do not pay. On Linux only;
elsewhere nothing is done, and nothing compiled.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Sequence

_WORDS = 32
"""64-bit words of room for a ``struct sigaction``, which is 19 long and begins with the handler's address (glibc, on
x86-64 and aarch64). Nothing else of it can be compared: of the mask, glibc fills in more than the kernel says."""

_LINUX = sys.platform == "linux"
_NUMBERS = [
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "PIPE", "TERM", "XCPU", "XFSZ")
    if _LINUX
]

if _LINUX:
    # PyDLL keeps the GIL, which these calls are too short to let go.
    _sigaction = ctypes.PyDLL(None).sigaction
    _sigaction.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class Dispositions:
    """Signal handlers of this process as the C library has them. Works in any thread, for one at a time."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Read those of the signals ``numbers``."""
        self._numbers = [int(number) for number in numbers] if _LINUX else []
        self._held = (ctypes.c_uint64 * (_WORDS * len(self._numbers)))()
        self._now = (ctypes.c_uint64 * (_WORDS * len(self._numbers)))()
        self._to_held = [(number, None, at) for number, at in self._places(self._held)]
        self._to_now = [(number, None, at) for number, at in self._places(self._now)]
        self.read()

    def _places(self, words: ctypes.Array[ctypes.c_uint64]) -> list[tuple[int, int]]:
        return [(number, ctypes.addressof(words) + 8 * _WORDS * i) for i, number in enumerate(self._numbers)]

    def read(self) -> None:
        """Take the current handlers as those to keep."""
        _call(self._to_held)

    def put_back(self) -> list[int]:
        """Undo what others than ``signal.signal`` have changed since, and return the signals concerned."""
        _call(self._to_now)
        before, after = self._held[::_WORDS], self._now[::_WORDS]
        if before == after:
            return []
        stolen = [
            (number, at, None)
            for (number, at), was, now in zip(self._places(self._held), before, after, strict=True)
            if was != now and not _by_python(number, was, now)
        ]
        _call(stolen)
        return [number for number, _, _ in stolen]


def _by_python(number: int, before: int, after: int) -> bool:
    """Return True if ``signal.signal`` was called in between: Python has the handler of now, or never had the old."""
    handler = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.SIG_IGN):
        return after == handler
    return callable(handler) and before in (signal.SIG_DFL, signal.SIG_IGN)


def _call(arguments: Sequence[tuple[int, int | None, int | None]]) -> None:
    """Call ``sigaction`` with each: signal, where to read the new action, where to write the current one."""
    for each in arguments:
        if _sigaction(*each):
            raise OSError(f"sigaction was refused for {signal.Signals(each[0]).name}")


class _Kept:
    """See :data:`kept`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._all = Dispositions(_NUMBERS)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._all.read()
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            self._all.put_back()


kept = _Kept()
"""``with kept:`` around what may make Triton compile. Several threads may be in it at a time, each more than once."""
