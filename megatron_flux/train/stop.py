"""Ending a run on a signal: after the step that it arrives in, on all ranks alike, with a checkpoint.

A cluster says some minutes ahead that a job's time is up. The signal reaches the ranks at different moments, some of
them a step apart, so they agree after every step; the handler itself only takes a note. Compilers may have taken the
signal over meanwhile (:mod:`kernels.signals` says how, and watches Triton's, but not torch.compile's): it is
taken back after every step, and who sends it sends it again until the run has ended.

Slurm signals every process of a step, and what a rank has started (an assembler, say) would die of it and take the rank
along. So the main thread blocks the signal, which threads and processes inherit: there it waits until somebody looks.
The handler hears it where older threads are, which do not block it.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from megatron_flux.kernels.signals import Dispositions


class StopRequest:
    """Notes a signal. Without one to listen to, nobody ever stops and the ranks need not agree.

    A context manager, after which the signal is ignored: it may come again until the process has ended, and Python,
    when it ends, puts signals that have handlers back to what kills a process. For the main thread.
    """

    def __init__(self, name: str | None, device: torch.device) -> None:
        """Listen from now on.

        Args:
            name: ``USR1``, or None.
            device: where the ranks' agreement is computed.
        """
        self.name = name
        self._device = device
        self._noted = False
        if name is not None:
            self._number = signal.Signals[f"SIG{name}"]
            signal.signal(self._number, self._note)
            signal.pthread_sigmask(signal.SIG_BLOCK, [self._number])
            self._listening = Dispositions([self._number])

    def __enter__(self) -> Self:
        """Return the request itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Ignore the signal from here on, in what is started too."""
        if self.name is not None:
            self._ignore()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [self._number])

    def _ignore(self) -> None:
        signal.signal(self._number, signal.SIG_IGN)  # which also drops one that waits

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def noted(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self._noted or self._number in signal.sigpending()

    def agreed(self) -> bool:
        """Whether any rank has been asked to stop; then the signal is ignored. A collective call."""
        if self.name is None:
            return False
        self._listening.put_back()
        noted = torch.tensor([self.noted()], dtype=torch.int32, device=self._device)
        dist.all_reduce(noted, op=dist.ReduceOp.MAX)
        if not noted.item():
            return False
        self._ignore()  # it comes again, and need not interrupt the writing of the checkpoint
        return True
