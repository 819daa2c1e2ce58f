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

from megatron_flux.comm import agreement, mailbox
from tests.distributed.data import attempt
from tests.distributed.pool import WorkerPool, on_ranks

LARGE = "x" * mailbox.SLOT_BYTES


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


def agreed(times: int = 3) -> tuple[dist.ProcessGroup, Counting]:
    """A group that has agreed so often: ranks look into boxes when the first ends, and say so to all by the third."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    for number in range(times):
        both(number, group)
    one = agreement._agreements[group]
    one._store = counting = Counting(one._store, one._ended)
    return group, counting


def both(value: Any, group: dist.ProcessGroup) -> None:
    assert agreement.of_all_ranks((value, group.rank()), group) == [(value, rank) for rank in range(group.size())]


@on_ranks("world")
def test_once_the_memory_is_there_nobody_asks_the_store() -> None:
    group, counting = agreed()
    for number in range(3 * mailbox.SLOTS):
        both(number, group)
    # The first ones' keys are withdrawn.
    assert [name for name in counting.requests if name != "delete_key"] == []
    assert counting.requests.count("delete_key") <= 3
    counting.requests.clear()
    both("more", group)
    assert counting.requests == []


@on_ranks("world2")
def test_a_slot_is_not_written_again_before_a_slow_peer_has_read_it() -> None:
    group, counting = agreed()
    slow = agreement.begin(("slow", dist.get_rank()), group, "slow")
    if dist.get_rank() == 0:
        assert slow() == [("slow", 0), ("slow", 1)]
    for number in range(3 * mailbox.SLOTS):
        both(number, group)
    assert counting.requests.count("set") == 3, "what has the same slot goes over the store"
    if dist.get_rank() == 1:
        assert slow() == [("slow", 0), ("slow", 1)]
    counting.requests.clear()
    for number in range(2 * mailbox.SLOTS):
        both(number, group)
    assert counting.requests.count("set") <= 1, "its slot is free again"


@on_ranks("world2")
def test_more_than_there_are_slots_may_have_begun() -> None:
    group, _ = agreed()
    rank, numbers = dist.get_rank(), range(2 * mailbox.SLOTS + 3)
    ends = [agreement.begin((number, rank), group, f"number {number}") for number in numbers]
    for number in reversed(numbers) if rank else numbers:
        assert ends[number]() == [(number, 0), (number, 1)]


@on_ranks("world2")
def test_a_message_too_large_for_a_slot_goes_over_the_store() -> None:
    group, counting = agreed()
    rank = dist.get_rank()
    for number in range(8):
        mine = [number, LARGE if (number + rank) % 3 == 0 else ""]
        ends = [agreement.begin(mine, group, "large"), agreement.begin(number, group, "small")]
        found = [end() for end in (ends[::-1] if rank else ends)]
        large, small = found[::-1] if rank else found
        assert small == [number, number]
        assert large == [[number, LARGE if (number + by) % 3 == 0 else ""] for by in range(2)]
    assert counting.requests.count("set") == sum((number + rank) % 3 == 0 for number in range(8))


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
        return mock.patch.object(mailbox.Box, "at", side_effect=PermissionError("not allowed, for a test"))
    return mock.patch.object(os, "posix_fallocate", side_effect=OSError("no memory, for a test"))


@pytest.mark.parametrize("what", ["memory", "mapping", "hosts"])
@on_ranks("world2")
def test_without_memory_on_one_rank_all_stay_with_the_store(what: str) -> None:
    with fails(what):
        group, counting = agreed()
    for number in range(2 * mailbox.SLOTS):
        both(number, group)
    assert counting.requests.count("set") == 2 * mailbox.SLOTS
    assert (agreement._agreements[group]._box is None) is (what != "mapping")  # peers have mapped it and look
