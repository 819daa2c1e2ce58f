"""Host-side agreement of a group's ranks, so that none of them raises while its peers wait.

* :func:`first_rank`: what one rank does alone (files) ends in a broadcast of its result *or its error*.
* :func:`failures`: what all ranks have just tried, and on which of them it failed. It goes over the job's store and not
  over NCCL: where one rank fails before it launches a kernel, its peers' GPUs already wait for it in theirs, and NCCL's
  kernels would wait behind those.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_flux.errors import OperatorError

_Result = TypeVar("_Result")

PATIENCE = timedelta(minutes=10)
"""How long :func:`failures` waits for a peer: a kernel is compiled within, on a busy host too."""


def first_rank(group: dist.ProcessGroup, work: Callable[[], _Result]) -> _Result:
    """What ``work()`` returns on the first rank of ``group``, which alone calls it; collective.

    Raises:
        OperatorError: it raised there; on all ranks, with the cause in words.
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

    Args:
        group: its ranks must call this at the same point.
        mine: what failed on this rank; None if nothing did.

    Raises:
        OperatorError: a rank did not say anything in time.
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
