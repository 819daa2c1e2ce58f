"""Which kernels of other process groups can run beside those of a group. One collective per group, remembered.

Why it matters: a fused kernel holds every SM and waits for its peers. An NCCL kernel of another group that is started
in the other order on two ranks waits there for SMs, and for each other, without end. torch.distributed cannot be asked
whether a group's collectives are waited for by the stream of the layers or run on one of their own, so whatever is not
known to be waited for counts. Groups that are made after the first question are not seen.

Known to be waited for: the default group's, and of those that Megatron makes over the very ranks of tensor parallelism
the ones in :data:`WAITED_FOR` (norms, losses, gradients of norms, and what only says who is who).
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

WAITED_FOR = frozenset(
    {
        "MODEL_PARALLEL_GROUP",
        "TENSOR_MODEL_PARALLEL_GROUP",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    }
)
"""``group_desc`` of groups whose collectives the compute stream waits for, where they span the same ranks."""

TRUE = ("1", "t", "true", "y", "yes")


class Beside(NamedTuple):
    """What can run beside a group's kernels on some rank of it."""

    others: bool
    """NCCL kernels of another group."""
    high_priority: bool
    """NCCL kernels on streams of high priority, of whatever group."""


ALONE = Beside(others=False, high_priority=False)

_known: dict[str, Beside] = {}


def beside(group: dist.ProcessGroup) -> Beside:
    """The same on all ranks of ``group``; collective on first use, so call it on all of them at the same point."""
    found = _known.get(group.group_name)
    if found is None:
        mine = seen(group)
        everyone = [mine] * group.size()
        dist.all_gather_object(everyone, mine, group=group)
        found = _known[group.group_name] = Beside(*(any(column) for column in zip(*everyone, strict=True)))
    return found


def forget() -> None:
    """Drop what was remembered (groups may be destroyed and made again under the same name)."""
    _known.clear()


def seen(group: dist.ProcessGroup) -> Beside:
    """What this rank sees."""
    groups = [other for other in dist.distributed_c10d._world.pg_map if other.size() > 1 and _on_nccl(other)]
    mine = set(dist.get_process_group_ranks(group))
    others = any(
        other is not group
        and other.group_desc != "default_pg"
        and not (other.group_desc in WAITED_FOR and set(dist.get_process_group_ranks(other)) == mine)
        for other in groups
    )
    every = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "").lower() in TRUE
    return Beside(others, bool(groups) and (every or any(map(_has_high_priority, groups))))


def _on_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.distributed_c10d._world.pg_backend_config.get(group, "")


def _has_high_priority(group: dist.ProcessGroup) -> bool:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # a stand-in group, whose collectives are its pair's
        return False
    return bool(getattr(getattr(backend, "options", None), "is_high_priority_stream", False))
