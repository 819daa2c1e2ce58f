"""Process groups that count as running beside tensor parallelism: Megatron's and others, on real ranks."""

from collections.abc import Iterable

import pytest
import torch.distributed as dist

from megatron_flux.comm import links
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.links import Beside
from tests.distributed.megatron_world import megatron
from tests.distributed.pool import WorkerPool


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


def tensor_parallel_alone(tp: int) -> tuple[Beside, Beside]:
    from megatron.core import parallel_state

    left = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}  # by other tests
    with megatron(tp=tp):
        group = parallel_state.get_tensor_model_parallel_group()
        return asked(group, left), asked(group, left, TORCH_NCCL_HIGH_PRIORITY="1")


def another_group(ranks: list[int]) -> tuple[Beside, Beside]:
    """Return the result of the world's ranks, and this one's own."""
    made = dist.new_group(ranks)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Other tests leave groups of Megatron's.
            patch.setattr(links, "_on_nccl", lambda other: other is made)
            return asked_anew(dist.group.WORLD), links.seen(dist.group.WORLD)
    finally:
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)


def test_megatron_waits_for_its_groups_over_the_same_ranks(world2: WorkerPool) -> None:
    for plain, high in world2.run(tensor_parallel_alone, 2):
        assert plain == Beside(others=False, high_priority=False)
        assert high == Beside(others=False, high_priority=True)


def test_data_parallelism_is_beside(world4: WorkerPool) -> None:
    for plain, _ in world4.run(tensor_parallel_alone, 2):
        assert plain.others


def test_another_group_over_the_same_ranks_is_beside(world2: WorkerPool) -> None:
    for all_of_them, _ in world2.run(another_group, [0, 1]):
        assert all_of_them == Beside(others=True, high_priority=False)


def test_a_group_of_some_ranks_counts_on_all(world4: WorkerPool) -> None:
    """Ranks that decided by what they see themselves would run different backends, and hang."""
    found = world4.run(another_group, [0, 1])
    assert [mine.others for _, mine in found] == [True, True, False, False]
    assert all(all_of_them.others for all_of_them, _ in found)
