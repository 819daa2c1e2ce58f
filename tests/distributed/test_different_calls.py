"""Ranks that make different calls of equal size, each made by both before: no wait sees that, so the host does."""

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import drop_slabs, state_of
from megatron_flux.errors import OperatorError
from megatron_flux.ops import call as calls
from megatron_flux.ops.backends.registry import get_backend
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_ops import use
from tests.distributed.twins import NEEDS_TRITON, TINY, twin

pytestmark = NEEDS_TRITON
WAYS = ("fused", "host memory", "peers' memory")


def backend(way: str) -> Any:
    os.environ["MEGATRON_FLUX_TIMEOUT_S"] = "2"
    drop_slabs()
    if way == "fused":
        return twin(KernelConfig(**TINY))
    use(way, dist.group.WORLD)
    return get_backend("chunked")


def call(by: Any, m: int, k: int) -> Any:
    x, w = torch.ones(m, k, dtype=torch.float16), torch.ones(32, k, dtype=torch.float16)
    return OperatorCall("all_gather_gemm", x, w, dist.group.WORLD).run(by)


def rank_differs(way: str) -> str:
    by, rank = backend(way), dist.get_rank()
    for _ in range(2):
        call(by, 16, 32)
        call(by, 32, 16)
    dist.barrier()
    time.sleep(0.5 * rank)
    try:
        y, _ = call(by, *((16, 32), (32, 16))[rank])
    except OperatorError as error:
        with pytest.raises(OperatorError) as again:
            call(by, 16, 32)
        raise AssertionError(f"{error} THEN {again.value}") from None
    return f"numbers: {y.flatten()[:3]}"


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_make_different_calls_of_equal_size(world2: WorkerPool, way: str) -> None:
    first, second = world2.outcomes(rank_differs, way)
    assert second.value is None, second.value
    said = (
        "rank 1 (tp rank 1 of 2) makes all_gather_gemm m=64 n=32 k=16 dtype=torch.float16 transposed=False, and peer "
        "rank 0 (tp rank 0) all_gather_gemm m=32 n=32 k=32 dtype=torch.float16 transposed=False, as the group's call "
    )
    assert said in (second.error or ""), second.error
    assert "THEN rank 1 (tp rank 1 of 2): a call of all_gather_gemm was broken off here" in (second.error or "")
    assert first.value is None, first.value


@pytest.mark.parametrize("way", ["fused", "host memory"])
@on_ranks("world2")
def test_a_call_that_is_made_again_is_counted_once(way: str) -> None:
    by, group = backend(way), dist.group.WORLD
    call(by, 16, 32)
    no_memory = mock.Mock(side_effect=torch.OutOfMemoryError("no memory, for a test"))
    if dist.get_rank() == 0:
        with mock.patch.object(torch.Tensor, "new_empty", no_memory), mock.patch.object(torch, "empty", no_memory):
            for _ in range(3):
                with pytest.raises(torch.OutOfMemoryError):
                    call(by, 16, 32)
    for _ in range(3):
        call(by, 16, 32)
    numbers = [None, None]
    dist.all_gather_object(numbers, state_of(group).table.number)  # type: ignore[union-attr]
    assert numbers[0] == numbers[1]
    state_of(group).transports.clear()
    drop_slabs()


@on_ranks("world2")
def test_ever_other_m_cost_no_word_between_ranks() -> None:
    by, asked, of_all_ranks = backend("fused"), [], calls.of_all_ranks

    def noted(mine: Any, group: Any, about: str) -> Any:
        asked.append(about)
        return of_all_ranks(mine, group, about)

    with mock.patch.object(calls, "of_all_ranks", noted):
        for m in range(2, 42, 2):
            call(by, m, 48)  # of no other test
    assert asked == ["comparing calls"] * calls.COMPARED_M
    del os.environ["MEGATRON_FLUX_TIMEOUT_S"]


@on_ranks("world2")
def test_another_m_than_the_peers_is_seen_without_a_word() -> None:
    by, rank = backend("fused"), dist.get_rank()
    for m in range(2, 42, 2):
        call(by, m, 80)
    dist.barrier()
    time.sleep(0.5 * rank)
    with pytest.raises(OperatorError) as caught:
        call(by, (44, 46)[rank], 80)
    dist.barrier()
    drop_slabs()  # for the tests behind this one
    del os.environ["MEGATRON_FLUX_TIMEOUT_S"]
    second = ("makes all_gather_gemm m=92 n=32 k=80", "a call that this rank has never made, as the group's call")
    assert all(words in str(caught.value) for words in (("timed out",), second)[rank])
