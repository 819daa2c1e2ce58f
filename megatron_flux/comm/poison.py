"""What becomes of a workspace when a call on it raises: no other call may follow, or it would read stale data.

A call takes its turn on a slab (:mod:`megatron_flux.comm.slab`) on the host, and its kernel leaves the next call the
number to wait for. When an exception comes in between (a kernel that cannot be compiled, a launch that CUDA refuses,
Ctrl-C) the turn is taken and the number is not: the next call would wait for one that its peers have sent long ago.

Contract
    * What can fail for want of memory comes before the turn: an exception until then leaves no trace, and the next call
      is as good as the first try. All ranks must have made the same calls then, as with any collective: one that ran
      out of memory alone makes its call again, or ends.
    * From the turn on, everything that a call does to its slab or enqueues lies inside :class:`unbroken`, or in a
      ``try`` that ends in :func:`broken_off` where an object per call is too much. It poisons the slab: every further
      call on this rank is an OperatorError that names the rank, the operator and the exception.
    * Peers cannot be told: they wait for data that does not come, until their own bounded wait ends, at the latest
      for the call after this one (the copies of this one may have been sent). No wait is satisfied by what is old.
    * In a CUDA graph's capture nothing has run yet and the slab stays good. What was captured of the call must not run:
      who catches the exception inside the capture gets a graph whose replay is an error.

How a job goes on
    It is started again from its last checkpoint. Two things end a slab's poison without that, both on all ranks
    together: a call that needs a larger slab, and :meth:`megatron_flux.comm.slab.SlabPool.renew` (of a backend,
    ``renew``), for whoever knows that the same call has failed on every rank, such as a tuner. ``unpatch()`` ends the
    use of slabs, not the poison.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch

from megatron_flux.comm.slab import Slab


class unbroken:  # noqa: N801 - used as a statement
    """``with unbroken(work, operator):`` around a call's turn and all that it enqueues."""

    __slots__ = ("_operator", "_work")

    def __init__(self, work: Slab, operator: str) -> None:
        """``operator``: its name, for people."""
        self._work, self._operator = work, operator

    def __enter__(self) -> None:
        """The turn is taken inside."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever ends the call also ends its slab."""
        if error is not None:
            broken_off(self._work, self._operator, error)


def broken_off(work: Slab, operator: str, error: BaseException) -> None:
    """``error`` ends a call of ``operator`` that may have taken its turn on ``work``; raise it again afterwards."""
    captured = work.captured and (work.capture is not None or torch.cuda.is_current_stream_capturing())
    if captured:
        _spoil(operator, error, work.data_table.device)
    else:
        work.poison(operator, error)
    side = work.views.get(("side",))
    if side is not None:
        with contextlib.suppress(Exception):
            _behind(side[0], captured)


def _behind(side: torch.cuda.Stream, captured: bool) -> None:
    """Put the current stream behind the copies of x that are on their way: what the caller does with its memory comes
    then, and a capture has no branch left that does not join.
    """
    if captured:
        with torch.cuda.stream(side):
            if not torch.cuda.is_current_stream_capturing():
                return
    torch.cuda.current_stream().wait_stream(side)


def _spoil(operator: str, error: BaseException, device: torch.device) -> None:
    """Have every replay of what is being captured end with an error."""
    said = f"a call of {operator} was broken off by {type(error).__name__} while this CUDA graph was captured"
    try:
        torch._assert_async(torch.zeros((), dtype=torch.bool, device=device), said)
    except Exception:
        # No memory for that: who waits for a stream that is captured ends the capture.
        with contextlib.suppress(Exception):
            torch.cuda.current_stream().synchronize()
