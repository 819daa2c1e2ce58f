"""Agreements of ranks on one host go through memory that they share, and over the store where they cannot."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_flux.comm import agreement
from tests.distributed.data import attempt
from tests.distributed.pool import WorkerPool, on_ranks


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
