"""Being asked to stop: after the step that the request arrives in, on all ranks alike, with a checkpoint.

A cluster signals some minutes before a job's time is up (SIGUSR1), or takes the node back with SIGTERM and, half a
minute later, SIGKILL. Both make a rank stop in order. But SIGTERM has other meanings, too: a launcher sends it to
what a rank that failed has left, Slurm to the tasks of a step of which one has failed, and the kernel to ranks whose
launcher is gone (:func:`megatron_flux.run.rank.end_with_parent`). Then peers are missing, and a rank that waited for
the end of its step would wait in a collective that never ends. So :class:`Peers` says whether the run has failed, and
where it has, SIGTERM ends the process at once, as if nobody listened.

Hazards
    * The main thread may be in a collective, where Python runs no handler. What notices SIGTERM is a thread of its own,
      woken by the file descriptor that Python writes a signal's number to in whichever thread the signal comes.
    * Slurm signals every process of a step, and the launcher signals its ranks again: SIGTERM comes twice. The second
      one means nothing new here: it is for launchers to end a run at once.
    * What a rank forks must not inherit that it listens: nothing could terminate it, and it would wake the parent's
      thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist

from megatron_flux.comm.agreement import lives, machine, of_all_ranks
from megatron_flux.kernels.signals import Dispositions

logger = logging.getLogger("megatron_flux")

FAILURES = "MEGATRON_FLUX_FAILURES"
"""Names the folder where :mod:`megatron_flux.run.node` leaves a line of each node that failed."""
_ENDING = (signal.SIGTERM, signal.SIGINT)
_FAILED = "megatron_flux/failed"
_EVERY, _EVERY_STORE = 0.2, 1.0
"""Seconds between two looks at this node's processes and files, and at the job's store, which all ranks share."""
_PATIENCE = timedelta(seconds=2)


class Peers:
    """The other ranks of the run, as far as one can see from here whether they are still there."""

    def __init__(self) -> None:
        """Find the ranks that this one's launcher has started. A collective call."""
        self._launcher = os.getppid()
        here = (machine(), self._launcher)
        mine = os.getpid()
        self._siblings: list[psutil.Process] = []
        self._gone = False
        for where, pid in of_all_ranks((here, mine), dist.group.WORLD):
            if where == here and pid != mine:
                try:
                    self._siblings.append(psutil.Process(pid))
                except psutil.NoSuchProcess:
                    self._gone = True
        # A connection of its own: another thread may hold the lock of the first one as it waits for a peer.
        self._store = dist.distributed_c10d._get_default_store().clone()
        self._store.set_timeout(_PATIENCE)
        self._failures = Path(os.environ[FAILURES]) if os.environ.get(FAILURES) else None
        self._noted = self._notes()

    def failed_here(self) -> bool:
        """Whether a rank of this launcher, or the launcher, has ended, or a launcher has noted a failure."""
        if self._gone or os.getppid() != self._launcher:
            return True
        return not all(map(lives, self._siblings)) or self._notes() != self._noted

    def failed_elsewhere(self) -> bool:
        """Whether a rank has said that it fails (:meth:`tell`), or the process with the job's store is gone."""
        try:
            return self._store.check([_FAILED])
        except dist.DistNetworkError:
            return True
        except RuntimeError:  # it has not answered in time
            return False

    def tell(self) -> None:
        """Tell ranks of other nodes that this one fails."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILED, "-")

    def _notes(self) -> set[str]:
        try:
            return set(os.listdir(self._failures)) if self._failures is not None else set()
        except OSError:  # it is made with the first note
            return set()


class Woken:
    """Calls ``heard(number)`` for signals in a thread of its own, though the main thread may wait where no Python runs.

    Set up and closed by the main thread.
    """

    def __init__(self, numbers: Iterable[int], heard: Callable[[int], object]) -> None:
        self._heard = heard
        self.closed = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._woken_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="megatron_flux.stop", daemon=True)

    def start(self) -> None:
        """Begin to call; signals that have come wait until then."""
        self._thread.start()

    def _listen(self) -> None:
        while come := os.read(self._read, 64):
            for number in come:
                if self.closed.is_set():
                    return
                if number in self._before:
                    self._heard(number)

    def close(self, *, ignored: bool) -> None:
        """Listen no longer: the signals are ignored, or what they were before."""
        self.closed.set()
        os.write(self._write, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._woken_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignored else (handler or signal.SIG_DFL))
        os.close(self._read)
        os.close(self._write)


class _Ending:
    """Notes SIGTERM and SIGINT instead of dying of them, unless the run has failed. For the main thread."""

    def __init__(self, peers: Peers) -> None:
        self.noted = False
        self._peers = peers
        self._woken = Woken(_ENDING, self._heard)
        self._woken.start()

    def _heard(self, number: int) -> None:
        self.noted = True
        looks = 0
        while not self._woken.closed.is_set():
            if self._peers.failed_here() or (
                looks % int(_EVERY_STORE / _EVERY) == 0 and self._peers.failed_elsewhere()
            ):
                self._peers.tell()
                die()
            if looks == 0:
                logger.info("%s: the run stops after the step it is at", signal.Signals(number).name)
            looks += 1
            self._woken.closed.wait(_EVERY)

    def close(self, *, stopped: bool) -> None:
        """Listen no longer. After an orderly stop the signals are ignored, since they come more than once."""
        self._woken.close(ignored=stopped)

    def forget(self) -> None:
        """In a forked process: die of the signals again."""
        with contextlib.suppress(ValueError):  # not forked by the main thread: it keeps its handlers
            signal.set_wakeup_fd(-1)
            for number in _ENDING:
                signal.signal(number, signal.SIG_DFL)


_listening: list[_Ending] = []


def _forget() -> None:
    for ending in _listening:
        ending.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def die() -> None:
    """Of SIGTERM, at once. ``signal.signal`` is for the main thread alone, which may wait for a peer without end."""
    ctypes.CDLL(None).signal(signal.SIGTERM, 0)
    os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Ends a run on a signal: after the step that it arrives in, on all ranks alike, with a checkpoint.

    The signal reaches the ranks at different moments, some of them a step apart, so they agree after every step; the
    handler itself only takes a note. Compilers may have taken the signal over meanwhile
    (:mod:`megatron_flux.kernels.signals` says how, and watches Triton's, but not torch.compile's): it is taken back
    after every step, and who sends it sends it again until the run has ended.

    Slurm signals every process of a step, and what a rank has started (an assembler, say) would die of it and take the
    rank along. So the main thread blocks SIGUSR1, which threads and processes inherit: it stays pending until it is
    looked for. Older threads do not block it: there the handler hears it. SIGTERM and SIGINT are not blocked: what a
    rank has started must be able to die of them.

    A context manager, after which the signal is ignored: it may come again until the process has ended, and Python,
    when it ends, puts signals that have handlers back to what kills a process. For the main thread.
    """

    def __init__(self, name: str | None, device: torch.device, peers: Peers | None = None) -> None:
        """Listen for ``name`` (``USR1``) from now on, and with ``peers`` for SIGTERM and SIGINT; ranks agree on
        ``device``. Without a name no rank ever stops.
        """
        self._name, self._device, self._peers = name, device, peers
        self._noted = self._stopped = False
        self._ending: _Ending | None = None
        if name is None:
            return
        self._number = signal.Signals[f"SIG{name}"]
        signal.signal(self._number, self._note)
        signal.pthread_sigmask(signal.SIG_BLOCK, [self._number])
        if peers is not None:
            self._ending = _Ending(peers)
            _listening.append(self._ending)
        self._listening = Dispositions([self._number, *(_ENDING if peers is not None else ())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._name is None:
            return
        if self._ending is not None and self._peers is not None:
            if kind is not None:
                self._peers.tell()
            _listening.remove(self._ending)
            self._ending.close(stopped=self._stopped and kind is None)
        signal.signal(self._number, signal.SIG_IGN)  # which also drops one that waits
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [self._number])

    def _note(self, *_: object) -> None:
        self._noted = True

    def noted(self) -> bool:
        """Whether this rank has been asked to stop."""
        ending = self._ending is not None and self._ending.noted
        return ending or self._noted or self._number in signal.sigpending()

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop; then SIGUSR1 is ignored. A collective call."""
        if self._name is None:
            return False
        self._listening.put_back()
        noted = torch.tensor([self.noted()], dtype=torch.int32, device=self._device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        if not noted.item():
            return False
        self._stopped = True
        signal.signal(self._number, signal.SIG_IGN)  # it comes again, and need not interrupt the saving
        return True
