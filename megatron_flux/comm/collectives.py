"""The two collectives of sequence parallelism, over torch.distributed (NCCL or gloo).

Rank ``r`` of a group of ``tp`` owns rows ``[r*m/tp, (r+1)*m/tp)`` of a matrix of ``m`` rows:

* ``all_gather``: ``[m/tp, k]`` on every rank to ``[m, k]`` on every rank, in rank order.
* ``reduce_scatter``: ``[m, n]`` partial sums on every rank to the summed ``[m/tp, n]`` of the rank's own rows.

Both must be called by all ranks of the group with the same shape and dtype, in the same order. A failure (a peer that
died, a transport error) is re-raised as :class:`~megatron_flux.errors.OperatorError` naming rank, operator, peers and
shape. How long a lost peer goes unnoticed is the process group's own time-out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux.comm.pending import Pending
from megatron_flux.errors import OperatorError

# torch 2.13 renamed both and warns of the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


FAILURES = (RuntimeError, ValueError)
"""What a collective raises: torch.distributed's own errors derive from RuntimeError."""


def describe_failure(operator: str, x: torch.Tensor, group: dist.ProcessGroup, error: BaseException) -> str:
    """One line that names rank, operator, peers, shape and the transport's own words."""
    ranks = dist.get_process_group_ranks(group)
    peers = [r for r in ranks if r != dist.get_rank()]
    cause = " ".join(str(error).split())
    return (
        f"rank {dist.get_rank()} (tp rank {group.rank()} of {group.size()}): {operator} of "
        f"{tuple(x.shape)} {x.dtype} on {x.device} with peer rank(s) {peers} failed: {cause}"
    )


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Pending:
    """Start gathering ``x`` ``[m/tp, k]`` (contiguous) to ``[m, k]``; finished on return unless ``async_op``."""
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return _start("all_gather", _all_gather_single, gathered, x, group, async_op)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> Pending:
    """Start summing ``x`` ``[m, n]`` (contiguous) over ranks into ``[m/tp, n]``; finished unless ``async_op``."""
    shard = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    return _start("reduce_scatter", _reduce_scatter_single, shard, x, group, async_op)


def _start(
    operator: str,
    collective: Callable[..., dist.Work | None],
    result: torch.Tensor,
    x: torch.Tensor,
    group: dist.ProcessGroup,
    async_op: bool,
) -> Pending:
    # Plain try statements: this is on the path of every layer, and a context manager costs as much as the rest of it.
    try:
        work = collective(result, x, group=group, async_op=async_op)
    except FAILURES as error:
        raise OperatorError(describe_failure(operator, x, group, error)) from error
    if work is None:
        return Pending(result)

    def wait() -> None:
        try:
            work.wait()
        except FAILURES as error:
            raise OperatorError(describe_failure(operator, x, group, error)) from error

    return Pending(result, wait, keep=(x,))
