"""Stop requests: end after the step in which a signal arrives, on all ranks alike, with a checkpoint.

A cluster signals some minutes before a job's time is up (SIGUSR1), or takes the node back with SIGTERM and, half a
minute later, SIGKILL. Both make a rank stop in order. But a launcher also sends SIGTERM to what a rank that failed has
left, Slurm to the tasks of a step of which one has failed, and the kernel to ranks whose launcher has exited. A rank
that waited for the end of its step would then wait in a collective that never ends. So :class:`Peers` says if the run
has failed, and then SIGTERM ends the process at once.

Hazards
    * The main thread may be in a collective, where Python runs no handler. What notices SIGTERM is a thread of its own,
      woken by the file descriptor that Python writes a signal's number to in whichever thread the signal comes.
    * Slurm signals every process of a step, and the launcher signals its ranks again: a second SIGTERM means nothing
      new here. It is for launchers to end a run at once.
    * Compilers may take SIGUSR1 over (:mod:`megatron_flux.kernels.signals` says how, and watches Triton's, but not
      torch.compile's): it is taken back after every step, and the sender repeats it until the run has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist

from megatron_flux.comm.agreement import lives, machine, of_all_ranks
from megatron_flux.kernels.signals import Dispositions
from megatron_flux.log_once import logger

FAILURES = "MEGATRON_FLUX_FAILURES"
"""Names the folder where :mod:`megatron_flux.run.node` leaves a line of each node that failed."""
_STOP, _ENDING = signal.SIGUSR1, (signal.SIGTERM, signal.SIGINT)
_INTERVAL = 0.2  # seconds between two looks at this node's processes and the notes of all nodes


def notes() -> set[str]:
    """Return the names of the notes in the folder that :data:`FAILURES` names, if any."""
    try:
        return set(os.listdir(os.environ.get(FAILURES, "")))
    except OSError:  # it is made with the first note
        return set()


class Peers:
    """The other ranks of the run, as far as this one can see if they are still there."""

    def __init__(self) -> None:
        """Find the ranks that this one's launcher has started. A collective call."""
        self._launcher = os.getppid()
        here, mine = (machine(), self._launcher), os.getpid()
        self._siblings: list[psutil.Process] = []
        self._gone = False
        for where, pid in of_all_ranks((here, mine), dist.distributed_c10d._get_default_group()):
            if where == here and pid != mine:
                try:
                    self._siblings.append(psutil.Process(pid))
                except psutil.NoSuchProcess:
                    self._gone = True
        self._notes_before = notes()

    def failed(self) -> bool:
        """Return True if a rank of this launcher, or the launcher, has exited, or a launcher has noted a failure."""
        if self._gone or os.getppid() != self._launcher:
            return True
        return not all(map(lives, self._siblings)) or notes() != self._notes_before


class SignalListener:
    """Calls ``handle(number)`` for signals in a thread: the main thread, which owns it, may wait outside Python."""

    def __init__(self, numbers: Iterable[int], handle: Callable[[int], object]) -> None:
        self._handle = handle
        self.closed = threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="megatron_flux.stop", daemon=True)

    def start(self) -> None:
        """Begin to call; signals that have come wait until then."""
        self._thread.start()

    def _listen(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if self.closed.is_set():
                    return
                if number in self._before:
                    self._handle(number)

    def close(self, *, ignored: bool) -> None:
        """Stop listening: from now on the signals are ignored, or what they were before."""
        self.closed.set()
        os.write(self._write, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignored else (handler or signal.SIG_DFL))
        os.close(self._read)
        os.close(self._write)


def die() -> None:
    """Die of SIGTERM at once. ``signal.signal`` is for the main thread alone, which may wait for a peer without end."""
    ctypes.CDLL(None).signal(signal.SIGTERM, 0)
    os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Ends a run on a signal: after the step that it arrives in, on all ranks alike, with a checkpoint.

    The signal reaches the ranks at different moments, so they agree after every step; the handler only takes a note.
    Slurm signals every process of a step, and what a rank has started (an assembler, say) would die of it and take the
    rank along. So the main thread blocks SIGUSR1, which threads and processes inherit: it stays pending until it is
    looked for. Older threads do not block it: there the handler hears it. SIGTERM and SIGINT are not blocked: what a
    rank has started must be able to die of them. A thread notes these two, unless the run has failed.

    After the context the signal is ignored: it may come again until the process has ended, and Python, when it ends,
    puts signals that have handlers back to what kills a process. For the main thread.
    """

    def __init__(self, device: torch.device, peers: Peers | None = None) -> None:
        """Listen for SIGUSR1 from now on, and with ``peers`` for SIGTERM and SIGINT; ranks agree on ``device``."""
        self._device = device
        self._noted = self._stopped = False
        signal.signal(_STOP, self._note)
        signal.pthread_sigmask(signal.SIG_BLOCK, [_STOP])
        self._listener = None
        if peers is not None:
            self._listener = SignalListener(_ENDING, lambda number: self._terminate(number, peers))
            self._listener.start()
        self._handlers = Dispositions([_STOP, *(_ENDING if peers is not None else ())])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._listener is not None:
            self._listener.close(ignored=self._stopped and kind is None)
        signal.signal(_STOP, signal.SIG_IGN)  # which also drops one that waits
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [_STOP])

    def _note(self, *_: object) -> None:
        self._noted = True

    def _terminate(self, number: int, peers: Peers) -> None:
        """Note SIGTERM or SIGINT, and die of it once the run has failed. In the listener's thread."""
        assert self._listener is not None  # noqa: S101
        if not self._noted:
            logger.info("%s: the run stops after the step it is at", signal.Signals(number).name)
        self._noted = True
        while not self._listener.closed.is_set():
            if peers.failed():
                die()
            self._listener.closed.wait(_INTERVAL)

    def noted(self) -> bool:
        """Return True if this rank has been asked to stop."""
        return self._noted or _STOP in signal.sigpending()

    def agreed(self) -> bool:
        """Return True if any rank has been asked to stop; then SIGUSR1 is ignored. A collective call."""
        self._handlers.put_back()
        noted = torch.tensor([self.noted()], dtype=torch.int32, device=self._device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        if not noted.item():
            return False
        self._stopped = True
        signal.signal(_STOP, signal.SIG_IGN)  # it comes again, and need not interrupt the saving
        return True
