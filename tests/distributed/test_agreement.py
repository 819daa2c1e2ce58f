"""Calls in which one rank alone fails: every rank gets an OperatorError in seconds, with what, where and with whom."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import OperatorError, ops
from megatron_flux.comm import agreement, shared_memory, slab
from megatron_flux.errors import UserError
from megatron_flux.layers import column_parallel_linear, row_parallel_linear
from megatron_flux.ops.kernel_config import KernelConfig
from tests.distributed.data import attempt
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.test_fused_twin import call_of, right
from tests.distributed.twins import NEEDS_TRITON, TINY, registered, twin

pytestmark = NEEDS_TRITON

SECONDS = 10.0
NO_MEMORY = RuntimeError("CUDA driver error: out of memory")


def failing(times: int) -> Any:
    """Rank 1's part of a workspace fails so many times."""
    real, left = os.ftruncate, [times if dist.get_rank() == 1 else 0]

    def allocate(handle: int, nbytes: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise NO_MEMORY
        real(handle, nbytes)

    return mock.patch.object(os, "ftruncate", allocate)


@pytest.mark.parametrize("times", [1, 2])
@on_ranks("world2")
def test_a_workspace_that_one_rank_has_no_memory_for(times: int) -> None:
    """That rank gives torch's cache back and tries again once."""
    group, backend = dist.new_group([0, 1]), twin()
    call = call_of(backend, "gemm_reduce_scatter", group=group)
    with failing(times), mock.patch.object(torch.cuda, "empty_cache") as emptied:
        kind, said, seconds = attempt(call[0])
    right(call)  # nobody is left behind
    assert emptied.call_count == dist.get_rank()
    assert kind == ("SharedMemoryError" if times == 2 else "")
    if times == 2:
        assert seconds < SECONDS
        assert "failed (tp rank 1: RuntimeError: CUDA driver error: out of memory): " in said
        assert "fabric manager" not in said


@pytest.mark.parametrize("moment", ["before the workspace", "within it"])
@on_ranks("world2")
def test_first_calls_that_meet_each_other(moment: str) -> None:
    """Rank 1 runs out of memory in the middle of its first call, catches that and makes another first call."""
    group, backend = dist.new_group([0, 1]), twin()
    first, other = (call_of(backend, operator, group=group) for operator in ("gemm_reduce_scatter", "all_gather_gemm"))
    module, name = {"before the workspace": (shared_memory, "allocate"), "within it": (slab, "assemble")}[moment]
    if dist.get_rank() == 1:
        with mock.patch.object(module, name, side_effect=torch.OutOfMemoryError("out of memory")):
            assert attempt(first[0])[0] == "OutOfMemoryError"
        found = attempt(other[0])
    else:
        found = attempt(first[0])
    right(first)
    right(other)
    kind, said, seconds = found
    assert (kind, seconds < SECONDS) == ("OutOfStepError", True), said
    assert said.startswith(f"rank {dist.get_rank()} (tp rank {dist.get_rank()} of 2): the ranks of this group are at ")
    assert "rank 1: comparing calls (all_gather_gemm m=64" in said
    assert "\n" not in said


def ends_in_between(folder: Path) -> tuple[tuple[str, str, float], ...]:
    shared_memory.FOLDER = folder
    group, backend = dist.new_group([0, 1, 2]), twin()
    call, again = (call_of(backend, "all_gather_gemm", group=group) for _ in range(2))
    if dist.get_rank() == 1:
        with mock.patch.object(slab, "assemble", side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            call[0]()
    return attempt(call[0]), attempt(again[0])


def test_a_peer_that_ends_while_a_workspace_is_made(tmp_path: Path) -> None:
    with WorkerPool(3) as pool:
        outcomes = pool.outcomes(ends_in_between, tmp_path)
    assert outcomes[1].error == "the process ended with exit code -9"
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        for kind, said, seconds in outcomes[rank].value:
            assert kind == "OperatorError", said
            assert "the processes of peer rank(s) [1] have ended" in said
            assert seconds < SECONDS
    assert not list(tmp_path.iterdir())


@on_ranks("world2")
def test_one_that_has_begun_and_meets_another_is_an_error_where_it_ends() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    if dist.get_rank() == 0:
        end = agreement.begin(None, group, "a trial")
    else:
        kind, said, seconds = attempt(lambda: agreement.of_all_ranks(None, group, "a first call"))
    if dist.get_rank() == 0:
        assert agreement.of_all_ranks(3, group, "another call") == [3, 4]
        kind, said, seconds = attempt(end)
    else:
        assert agreement.of_all_ranks(4, group, "another call") == [3, 4]
    assert (kind, seconds < SECONDS) == ("OutOfStepError", True)
    assert "(rank 0: a trial; rank 1: a first call)" in said


def one_never_comes() -> tuple[str, str, float]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        time.sleep(4)
    found = attempt(lambda: agreement.of_all_ranks(dist.get_rank(), group, "a first call"))
    return found if found[0] else attempt(lambda: agreement.of_all_ranks(dist.get_rank(), group, "a second call"))


def test_a_peer_that_does_not_come_in_time_is_told_when_it_does(world2: WorkerPool) -> None:
    (kind, said, _), (late, told, seconds) = world2.run(one_never_comes)
    assert (kind, late) == ("OperatorError", "OperatorError")
    assert said == (
        "rank 0 (tp rank 0 of 2): a first call: no word from peer rank(s) [1] for 2 s, the process group's time-out"
    )
    assert told.endswith(f"agree on nothing any more since OperatorError: {said}")
    assert seconds < SECONDS


@pytest.mark.parametrize(
    ("operator", "backend"),
    [("all_gather_gemm", "twin"), ("gemm_reduce_scatter", "chunked"), ("gemm_reduce_scatter", "twin"),
     ("all_gather", "chunked")],
)  # fmt: skip
@on_ranks("world2")
def test_rows_on_some_ranks_only(operator: str, backend: str) -> None:
    group = dist.new_group([0, 1])
    rows = 4 * dist.get_rank()
    x, w = torch.ones(rows, 32, dtype=torch.float16), torch.ones(32, 32, dtype=torch.float16)
    with registered(KernelConfig(**TINY)) if backend == "twin" else nullcontext():
        began = time.monotonic()
        with pytest.raises(UserError) as caught:
            make(operator, x, w, group, backend)
        assert time.monotonic() - began < SECONDS
        for _ in range(2):
            assert not make(operator, x[:0], w, group, backend).numel()  # on all ranks, once compared and once not
        make(operator, torch.ones(4, 32, dtype=torch.float16), w, group, backend)
    said = str(caught.value)
    assert f"tp rank 0: {operator} m=0 " in said
    assert f"tp rank 1: {operator} m={8 if 'gather' in operator else 4} " in said
    assert "\n" not in said


def make(operator: str, x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup, backend: str) -> torch.Tensor:
    if operator == "all_gather":
        return ops.all_gather(x, group, backend=backend).wait()
    return getattr(ops, operator)(x, w, group, backend=backend)


# A peer that is killed within torch's collectives

OF_GLOO_S = 20.0
K, N = 4, 6


def calls() -> dict[str, Callable[[], object]]:
    x, weight = torch.ones(8, K), torch.ones(N, K)
    return {
        "gemm_reduce_scatter async": lambda: ops.gemm_reduce_scatter(x, weight, async_op=True).wait(),
        "gemm_reduce_scatter": lambda: ops.gemm_reduce_scatter(x, weight),
        "all_gather_gemm": lambda: ops.all_gather_gemm(x, weight),
        "all_gather": lambda: ops.all_gather(x).wait(),
    }


def rank_0_dies() -> dict[str, tuple[str, str, float]]:
    group, weight = dist.group.WORLD, torch.ones(N, K, requires_grad=True)
    column = column_parallel_linear(torch.ones(2, 1, K, requires_grad=True), weight, None, group)
    row = row_parallel_linear(torch.ones(4, 1, K, requires_grad=True), weight, group)
    for call in calls().values():
        call()
    if dist.get_rank() == 0:
        time.sleep(1.0)  # the survivor is inside the first collective by now
        os.kill(os.getpid(), signal.SIGKILL)
    backwards = {
        "all_gather column backward": lambda: column.sum().backward(),
        "all_gather row backward": lambda: row.sum().backward(),
    }
    return {name: attempt(call) for name, call in (calls() | backwards).items()}


def test_a_killed_peer() -> None:
    with WorkerPool(2) as pool:
        dead, survivor = pool.outcomes(rank_0_dies, timeout=2 * OF_GLOO_S)
    assert dead.error == "the process ended with exit code -9"
    assert survivor.error is None, survivor.error
    assert survivor.seconds < OF_GLOO_S
    attempts = survivor.value
    assert next(iter(attempts.values()))[2] > 0.1, "it did not wait for its peer"
    for name, (error, message, seconds) in attempts.items():
        assert (error, seconds < OF_GLOO_S) == (OperatorError.__name__, True), (name, error, message)
        collective = "reduce_scatter" if "reduce_scatter" in name else "all_gather"
        assert re.match(rf"rank 1 \(tp rank 1 of 2\): {collective} of \(.*torch.float32 on cpu", message), (
            name,
            message,
        )
        assert "with peer rank(s) [0] failed: " in message
    assert f"all_gather of {(8, K)}" in attempts["all_gather_gemm"][1]


class Counting:
    """A store that notes requests to it, but for looks whether a peer has failed: a long wait makes these."""

    def __init__(self, store: Any, ended: str) -> None:
        self._store, self._ended, self.requests = store, ended, list[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real = getattr(self._store, name)

        def noted(*args: Any) -> Any:
            if args != ([self._ended],):
                self.requests.append(name)
            return real(*args)

        return noted


def agreed() -> tuple[dist.ProcessGroup, Counting]:
    """A group that has agreed once, for which its ranks meet."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    both(0, group)
    one = agreement._agreements[group]
    one._store = counting = Counting(one._store, one._ended)
    return group, counting


def both(value: Any, group: dist.ProcessGroup) -> None:
    assert agreement.of_all_ranks((value, group.rank()), group) == [(value, rank) for rank in range(group.size())]


@on_ranks("world")
def test_once_ranks_have_met_nobody_asks_the_store() -> None:
    group, counting = agreed()
    for number in range(100):
        both(number, group)
    assert set(counting.requests) <= {"delete_key"}, "keys of the meeting are withdrawn"
    counting.requests.clear()
    both("x" * 100_000, group)
    assert counting.requests == []


@on_ranks("world2")
def test_what_has_begun_ends_in_any_order_and_over_further_meetings() -> None:
    """New boxes take over while agreements in the old ones are open."""
    with mock.patch.object(agreement, "MEET_EVERY", 8):
        group, counting = agreed()
        rank, numbers, first = dist.get_rank(), range(35), agreement._agreements[group]._box
        ends = [agreement.begin((number, rank), group, f"number {number}") for number in numbers]
        for number in reversed(numbers) if rank else numbers:
            assert ends[number]() == [(number, 0), (number, 1)]
    assert agreement._agreements[group]._box not in (None, first)
    assert agreement._agreements[group]._came == {}
    assert set(counting.requests) <= {"delete_key"}, "keys of the meeting are withdrawn"


def is_killed() -> tuple[tuple[str, str, float], ...]:
    group, _ = agreed()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return tuple(attempt(lambda: agreement.of_all_ranks(None, group, "a call")) for _ in range(2))


def test_a_peer_that_is_killed_while_its_box_is_looked_into_is_named() -> None:
    with WorkerPool(2) as pool:
        outcomes = pool.outcomes(is_killed)
    assert outcomes[1].error == "the process ended with exit code -9"
    for kind, said, seconds in outcomes[0].value:
        assert (kind, seconds < 2) == ("OperatorError", True)
        assert said.endswith("a call: the processes of peer rank(s) [1] have ended")


def fails(what: str) -> AbstractContextManager[Any]:
    """Rank 1 alone; hosts differ anyhow."""
    if what == "hosts":
        return mock.patch.object(agreement, "machine", return_value=(f"host {dist.get_rank()}",))
    if dist.get_rank() == 0:
        return nullcontext()
    if what == "mapping":
        return mock.patch.object(agreement.Box, "at", side_effect=PermissionError("not allowed, for a test"))
    return mock.patch.object(os, "memfd_create", side_effect=OSError("no memory, for a test"))


@pytest.mark.parametrize("what", ["memory", "mapping", "hosts"])
@on_ranks("world2")
def test_without_boxes_on_one_rank_all_stay_with_the_store(what: str) -> None:
    with fails(what):
        group, counting = agreed()
    slow = agreement.begin(("slow", dist.get_rank()), group, "slow")
    if dist.get_rank() == 0:
        assert slow() == [("slow", 0), ("slow", 1)]
    for number in range(20):
        both(number, group)
    if dist.get_rank() == 1:
        assert slow() == [("slow", 0), ("slow", 1)], "a key stays until all have read it"
    assert counting.requests.count("set") == 21
