"""Process groups that count as running beside tensor parallelism: Megatron's and others, on real ranks."""

from collections.abc import Iterable

import pytest
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Beside
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import on_ranks


def asked_anew(group: dist.ProcessGroup) -> Beside:
    state = state_of(group)
    state.beside = None
    try:
        return links.beside(group)
    finally:
        state.beside = None


def asked(group: dist.ProcessGroup, left: Iterable[dist.ProcessGroup], **variables: str) -> Beside:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "_on_nccl", lambda other: other not in left)
        for name, value in variables.items():
            patch.setenv(name, value)
        return asked_anew(group)


@on_ranks("world")
def test_megatron_waits_for_its_groups_over_the_same_ranks() -> None:
    """Data parallelism is over others."""
    from megatron.core import parallel_state

    left = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}  # by other tests
    with megatron(tp=2):
        group = parallel_state.get_tensor_model_parallel_group()
        plain, high = asked(group, left), asked(group, left, TORCH_NCCL_HIGH_PRIORITY="1")
    others = dist.get_world_size() > 2
    assert plain.others == others
    assert others or (plain.high_priority, high) == (False, Beside(others=False, high_priority=True))


@on_ranks("world")
def test_another_group_counts_on_all_ranks() -> None:
    """On those that are not in it, too: ranks that decided by what they see themselves would run different backends."""
    made = dist.new_group([0, 1])
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Other tests leave groups of Megatron's.
            patch.setattr(links, "_on_nccl", lambda other: other is made)
            assert asked_anew(dist.group.WORLD).others
            assert links.seen(dist.group.WORLD).others == (dist.get_rank() < 2)
    finally:
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)
