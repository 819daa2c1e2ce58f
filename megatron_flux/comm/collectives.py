"""The collectives of tensor parallelism over torch.distributed (NCCL or gloo).

Rank ``r`` of a group of ``tp`` owns rows ``[r*m/tp, (r+1)*m/tp)`` of a matrix of ``m`` rows. All ranks of the group
call them with the same shape and dtype, in the same order. A failure (a peer that died, a transport error) is an
OperatorError that names rank, operator, peers and shape. How long a lost peer goes unnoticed is the process group's own
time-out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.errors import OperatorError, one_line

# torch 2.13 renamed both and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_FAILURES = (RuntimeError, ValueError)
"""Errors of a collective: torch.distributed's own derive from RuntimeError."""


class Pending:
    """The result of an operator that was started. ``wait()`` returns the tensor once the current stream (CUDA) or the
    calling thread (CPU) may read it, and may be called more than once. Wait for a ``Pending`` before you drop it: it
    keeps the operands alive.
    """

    __slots__ = ("_keep", "_send", "_tensor", "_wait", "transposed")

    def __init__(
        self,
        tensor: torch.Tensor,
        wait: Callable[[], object] | None = None,
        keep: tuple[torch.Tensor, ...] = (),
        *,
        transposed: bool = False,
        send: Callable[[], object] | None = None,
    ) -> None:
        """``wait`` finishes ``tensor`` (None: it is finished), ``keep`` are operands still being read. ``transposed``:
        a gathered tensor came so. ``send``: begins what is held back, if ``wait`` has not.
        """
        self._tensor, self._wait, self._keep, self.transposed, self._send = tensor, wait, keep, transposed, send

    def then(self, do: Callable[[], object]) -> Pending:
        """Return the same operation, and call ``do`` once it has been waited for."""

        def wait() -> None:
            self.wait()
            do()

        return Pending(self._tensor, wait, transposed=self.transposed, send=self._send)

    def send(self) -> None:
        """Begin the transfers that were held back, if there are any."""
        if self._send is not None:
            self._send()

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result."""
        if self._wait is not None:
            self._wait()
            self._wait, self._send, self._keep = None, None, ()
        return self._tensor

    def map(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
        """Return the same operation with a view of its result (``view`` must not read the data)."""
        return Pending(view(self._tensor), self._wait and self.wait, transposed=self.transposed, send=self._send)

    def within(self, context: Callable[[], AbstractContextManager[object]]) -> Pending:
        """Return the same operation, waited for inside ``context()`` unless it is finished."""
        if self._wait is None:
            return self

        def wait() -> None:
            with context():
                self.wait()

        return Pending(self._tensor, wait, transposed=self.transposed, send=self._send)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Pending:
    """Start gathering ``x`` ``[m/tp, k]`` (contiguous) to ``[m, k]``; finished on return unless ``async_op``."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return _start(_all_gather_single, gathered, "all_gather", x, group, async_op)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Pending:
    """Start summing ``x`` ``[m, n]`` (contiguous) over ranks into ``[m/tp, n]``; finished unless ``async_op``."""
    shard = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return _start(_reduce_scatter_single, shard, "reduce_scatter", x, group, async_op)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Pending:
    """Start summing ``x`` (contiguous) over ranks in place; finished on return unless ``async_op``."""

    def collective(result: torch.Tensor, _: torch.Tensor, **how: Any) -> Any:
        return dist.all_reduce(result, **how)

    return _start(collective, x, "all_reduce", x, group, async_op)


def _start(
    collective: Any, result: torch.Tensor, operator: str, x: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> Pending:
    # Plain try statements: this is on the path of every layer, and a context manager costs as much as the rest of it.
    try:
        work = collective(result, x, group=group, async_op=async_op)
    except _FAILURES as error:
        raise OperatorError(_failure(operator, x, group, error)) from error
    if work is None:
        return Pending(result)

    def wait() -> None:
        try:
            work.wait()
        except _FAILURES as error:
            raise OperatorError(_failure(operator, x, group, error)) from error

    return Pending(result, wait, keep=(x,))


def _failure(operator: str, x: torch.Tensor, group: dist.ProcessGroup, error: BaseException) -> str:
    peers = [r for r in dist.get_process_group_ranks(group) if r != dist.get_rank()]
    return (
        f"rank {dist.get_rank()} (tp rank {group.rank()} of {group.size()}): {operator} of {tuple(x.shape)} {x.dtype} "
        f"on {x.device} with peer rank(s) {peers} failed: {one_line(error)}"
    )
