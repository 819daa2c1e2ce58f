"""What moves rows between the ranks of a group for operators that multiply block by block.

A transport knows bytes and peers, no matrices: *send these bytes to peer p; tell me when those of peer p are here*. Two
ways of it:

* a *gather*: every rank sends one block of bytes to all its peers;
* an *exchange*: every rank sends each peer a block of its own, one after the other.

Blocks are moved in *pieces*, cut at the same offsets on all ranks, so that a GEMM can begin with the first rows that
are here, and end soon after the last.

Contract
    * All ranks of a group make the same calls with the same sizes in the same order, as of any collective. Calls begin
      on the stream that is current (on CPUs: at once) and are finished in the order in which they began.
    * Tensors are uint8 and contiguous. What is sent must not change, and where it arrives not be read, until the call
      says so. The transport keeps both alive.
    * A call that cannot be finished raises :class:`~megatron_flux.errors.OperatorError` at its next step or in the next
      call, with rank, operator and peers. What breaks a call off in between (:func:`unbroken`) ends the transport:
      peers would wait for bytes that never come, and the next call would take one step for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Gather(Protocol):
    """A gather that has begun."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """``(peer, piece)`` in the order of arrival, each once. When one is returned, the stream that is current comes
        behind its arrival (on CPUs: it has arrived).
        """

    def enqueue(self) -> None:
        """Begin all that is left, and do not wait for it."""

    def wait(self) -> None:
        """Put the stream that is current behind the whole call. May be called more than once."""


class Exchange(Protocol):
    """An exchange that has begun."""

    @property
    def steps(self) -> Sequence[tuple[int, int]]:
        """``(peer, piece)`` in the order in which they must be sent."""

    def send(self, block: torch.Tensor) -> None:
        """The next step's bytes, which the stream that is current has written. They may leave with the next step."""

    def enqueue(self) -> None:
        """Behind the last :meth:`send`: begin all that is left, and do not wait for it."""

    def wait(self) -> None:
        """Put the stream that is current behind the whole call: all that was sent to this rank is here."""


class Transport(Protocol):
    """See the module."""

    kind: str
    captures: bool
    """Whether its calls may become part of CUDA graphs."""

    def gather(self, operator: str, mine: torch.Tensor, theirs: torch.Tensor, cuts: Sequence[int]) -> Gather:
        """Send ``mine`` ``[nbytes]`` to all peers; peer ``p``'s arrives in ``theirs[p]`` (``[tp, nbytes]``, whose own
        row is left alone). ``cuts``: where pieces begin, and ``nbytes``.
        """

    def exchange(self, operator: str, theirs: torch.Tensor, cuts: Sequence[int]) -> Exchange:
        """Send a block of ``nbytes`` to each peer; what peer ``p`` sends this rank arrives in ``theirs[p]``."""

    def broken_off(self, operator: str, error: BaseException) -> None:
        """``error`` ended a call that has begun: refuse all that come."""


@contextlib.contextmanager
def unbroken(transport: Transport, operator: str) -> Iterator[None]:
    """Around all that a call does from its beginning on."""
    try:
        yield
    except BaseException as error:
        transport.broken_off(operator, error)
        raise


def steps(rank: int, tp: int, pieces: int) -> list[tuple[int, int]]:
    """The order of an exchange: by piece; in step ``d`` rank ``r`` sends to ``r + d`` and receives from ``r - d``."""
    return [((rank + d) % tp, piece) for piece in range(pieces) for d in range(1, tp)]


def source(rank: int, tp: int, peer: int) -> int:
    """The rank that sends to ``rank`` while that sends to ``peer``."""
    return (2 * rank - peer) % tp
