"""The collectives of tensor parallelism over torch.distributed (NCCL or gloo), and how hosts agree on errors.

Rank ``r`` of a group of ``tp`` owns rows ``[r*m/tp, (r+1)*m/tp)`` of a matrix of ``m`` rows:

* :func:`all_gather`: ``[m/tp, k]`` on every rank to ``[m, k]`` on every rank, in rank order.
* :func:`reduce_scatter`: ``[m, n]`` partial sums on every rank to the summed ``[m/tp, n]`` of the rank's own rows.
* :func:`all_reduce`: ``[m, n]`` partial sums on every rank to their sum on every rank, without sequence parallelism.

All ranks of the group call them with the same shape and dtype, in the same order. A failure (a peer that died, a
transport error) is an OperatorError that names rank, operator, peers and shape. How long a lost peer goes unnoticed is
the process group's own time-out.

So that no rank raises while its peers wait, hosts agree:

* :func:`first_rank`: what one rank does alone (files) ends in a broadcast of its result *or its error*.
* :func:`failures`: what all ranks have just tried, and on which of them it failed. It goes over the job's store and not
  over NCCL: where one rank fails before it launches a kernel, its peers' GPUs already wait for it in theirs, and NCCL's
  kernels would wait behind those.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_flux.errors import OperatorError, one_line

# torch 2.13 renamed both and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_Result = TypeVar("_Result")

_FAILURES = (RuntimeError, ValueError)
"""What a collective raises: torch.distributed's own errors derive from RuntimeError."""

PATIENCE = timedelta(minutes=10)
"""How long :func:`failures` waits for a peer: a kernel is compiled within, on a busy host too."""


class Pending:
    """The result of an operator that was started and may not be finished. ``wait()`` returns the tensor once the
    current stream (CUDA) or the calling thread (CPU) may read it. It may be called more than once. A ``Pending`` must
    be waited for before it is dropped: it also keeps the operands alive.
    """

    __slots__ = ("_keep", "_tensor", "_wait", "own_rows")

    def __init__(
        self,
        tensor: torch.Tensor,
        wait: Callable[[], object] | None = None,
        keep: tuple[torch.Tensor, ...] = (),
        *,
        own_rows: bool = True,
    ) -> None:
        """``wait`` finishes ``tensor`` (None: it is finished), ``keep`` are operands still being read. ``own_rows``:
        False for a gathered tensor that has those of the peers only.
        """
        self._tensor, self._wait, self._keep, self.own_rows = tensor, wait, keep, own_rows

    def wait(self) -> torch.Tensor:
        """Finish the operation and return its result."""
        if self._wait is not None:
            self._wait()
            self._wait, self._keep = None, ()
        return self._tensor

    def map(self, view: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
        """The same operation with a view of its result (``view`` must not read the data)."""
        return Pending(view(self._tensor), self.wait, own_rows=self.own_rows)

    def within(self, context: Callable[[], AbstractContextManager[object]]) -> Pending:
        """The same operation whose unfinished part, if there is one, is waited for inside ``context()``."""
        if self._wait is None:
            return self

        def wait() -> None:
            with context():
                self.wait()

        return Pending(self._tensor, wait, own_rows=self.own_rows)


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


def of_all_ranks(mine: _Result, group: dist.ProcessGroup) -> list[_Result]:
    """What every rank of ``group`` says, by rank; collective. Raises OperatorError: a peer is gone or did not come."""
    said = [mine] * group.size()
    try:
        dist.all_gather_object(said, mine, group=group)
    except torch.OutOfMemoryError:  # no peer's fault
        raise
    except _FAILURES as error:
        peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        raise OperatorError(f"rank {dist.get_rank()}: no word from peer rank(s) {peers}: {one_line(error)}") from error
    return said


def first_rank(group: dist.ProcessGroup, work: Callable[[], _Result]) -> _Result:
    """What ``work()`` returns on the first rank of ``group``, which alone calls it; collective. Raises OperatorError:
    it raised there; on all ranks, with the cause in words.
    """
    said: list[Any] = [None, None]
    cause = None
    if group.rank() == 0:
        try:
            said[0] = work()
        except Exception as error:
            cause, said[1] = error, f"the first rank of the group failed: {type(error).__name__}: {error}"
    dist.broadcast_object_list(said, group=group, group_src=0)
    if said[1] is not None:
        raise OperatorError(said[1]) from cause
    return said[0]


def failures(group: dist.ProcessGroup, mine: str | None) -> dict[int, str]:
    """By global rank, what every rank of ``group`` on which something failed says of it. Collective, on hosts alone.
    ``mine`` says what failed on this rank; None if nothing did. Raises OperatorError: a rank did not say anything in
    time.
    """
    store = dist.distributed_c10d._get_default_store()
    me, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    # Groups that were split from one may share a name. The count is the store's: it goes on where a group is made again
    # under its name, which must not read what the one before has left there.
    name = f"megatron_flux/{group.group_name}/{min(ranks)}"
    turn = -(-store.add(f"{name}/asked", 1) // len(ranks))  # nobody asks again before all have answered

    def key(rank: int, turn: int) -> str:
        return f"{name}/{turn}/{rank}"

    # The first byte keeps "nothing failed" apart from an error without words; no store takes an empty value.
    store.set(key(me, turn), "-" if mine is None else f"!{mine}")
    try:
        store.wait([key(rank, turn) for rank in ranks], PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise OperatorError(f"rank {me}: a peer in {ranks} said nothing for {PATIENCE}: {error}") from error
    said = {rank: store.get(key(rank, turn)).decode() for rank in ranks}
    if turn > 1:
        store.delete_key(key(me, turn - 1))  # everybody has read it: all are in this round
    return {rank: words[1:] for rank, words in said.items() if words.startswith("!")}
