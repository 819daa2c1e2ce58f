"""Agreement between the ranks of a group on their hosts: one collective, through memory of their host or over the
job's store.

Use it for what a call does once (compare shapes, probe the link, make workspaces, tune), so that no rank raises while
its peers wait:

* :func:`of_all_ranks`: all-gather one small Python object per rank.
* :func:`begin`: the same in two halves. What a rank does between them, its peers need not wait for, nor it for them.
* :func:`together`: run a function on every rank; it succeeds on all of them or raises on all of them.
* :func:`first_rank`: run a function on the first rank only (files) and broadcast its result *or its error*.
* :func:`failures`: on which ranks something that all have just tried has failed.

It does not use the group's backend, because where one rank fails before it launches a kernel, its peers' GPUs already
wait for it in theirs, and NCCL's kernels would wait behind those.

Ways of a message
    * Ranks of one host have boxes in shared memory (:mod:`~megatron_flux.comm.mailbox`). A rank makes its own with the
      group's first agreement and says there where it is. Once all ranks look into all boxes, messages go that way.
    * The store is the way before that, of groups that span hosts or lack a box, and of single messages that do not fit
      into a slot or find none free. A box says so: its rank's newest number is one that it does not hold.
    * So a sender alone decides about each message, and no rank has to know when its peers change over. Who cannot map
      the others' boxes never says that it looks into them, and its group stays with the store.

Contract
    * Agreements of a group are numbered on each rank as they begin, and each says what it is about. Ranks that meet in
      agreements about different things all raise OutOfStepError with every rank's topic. That happens where one rank
      alone has caught an exception in the middle of a first call and made that call again, or another one. Nobody
      hangs, and the next agreement is in step again: the same call, made again on all ranks, may succeed.
    * Any number may have begun and not ended. A rank waits in one's end for peers to begin the same one, and for
      nothing else: whoever has the lowest number finds that its peers have begun it, in whatever order they end.
    * A message stays until all ranks have read it: each says what it has begun and not ended, whoever has begun a later
      one has read the rest. One that is never ended keeps its key in the store, or its slot.
    * A peer that does not come within the group's own time-out, or whose process has exited, is an OperatorError that
      names it. A process that exits on the same host is noticed within a second, once it has taken part in an
      agreement. Then no agreement of the group is possible any more, and each says so at once, on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch.distributed as dist

from megatron_flux.comm import mailbox
from megatron_flux.comm.timeouts import group_timeout_s
from megatron_flux.errors import OperatorError, one_line

_Result = TypeVar("_Result")

_LOOK_S = 0.5
"""Seconds between two looks at the peers' processes."""
_SPIN_S = 0.0001
"""Seconds of a wait that are spent awake: a thread that sleeps wakes up 0.05 to 0.1 ms late."""
_MAX_PAUSE_S = 0.02
_OVERSHOOT, _OVERSHOOT_BOXED = 0.25, 0.1
"""Of the time that a peer is late: how much longer its message may lie in the store, or in a box, before it is
noticed."""


def machine() -> tuple[str, ...]:
    """Return the scope in which process ids are unique: this boot of this kernel, and its namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return boot.read_text().strip(), os.readlink(space)
    except OSError:  # no Linux
        return (os.uname().nodename,)


def lives(process: psutil.Process) -> bool:
    """Return True if ``process`` has not exited; another process that has its number by now is not it."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class _Message(NamedTuple):
    about: str
    process: tuple[tuple[str, ...], int]  # its machine and id
    box: mailbox.Address | None
    value: Any
    unread: frozenset[int]  # numbers of agreements that the sender has begun and not ended, this one among them

    def __str__(self) -> str:
        return f"{self.about} ({self.value})" if isinstance(self.value, str) else self.about


class Agreements:
    """The calling rank's place in the agreements of one group."""

    def __init__(self, group: dist.ProcessGroup, name: str | None = None) -> None:
        """Tell the store that this rank is here. ``name``: replaces the group's own."""
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._ranks, self._rank = dist.get_process_group_ranks(group), dist.get_rank()
        self._who = f"rank {self._rank} (tp rank {group.rank()} of {len(self._ranks)})"
        self._timeout_s = group_timeout_s(group)
        # Groups that were split from one may share a name. So may a group that is made again, which must not read what
        # its predecessor left: each generation has a number.
        name = f"megatron_flux/{name or group.group_name}/{min(self._ranks)}"
        self._name = f"{name}/{-(-self._store.add(f'{name}/made', 1) // len(self._ranks))}"
        self._ended = f"{self._name}/ended"
        self._number = 0
        self._open: set[int] = set()
        """Numbers of what has begun and not ended."""
        self._left: list[int] = []
        """Numbers of what has ended, where peers may have to read this rank's message yet."""
        self._process = machine(), os.getpid()
        self._peers: dict[int, psutil.Process | None] = {}
        """Peers' processes on this host; None: it has exited."""
        self._box = mailbox.make()
        self._boxes: dict[int, mailbox.Box] | None = None
        """Peers' boxes; empty: not all could be mapped; None: that was not tried."""
        self._all_look = False
        """All ranks look into all boxes."""

    def begin(self, value: Any, about: str) -> Callable[[], list[Any]]:
        """See :func:`begin`."""
        self._number += 1
        self._open.add(self._number)
        try:
            address = self._box.address if self._box is not None else None
            message = pickle.dumps((about, self._process, address, value, frozenset(self._open)))
            boxed = self._all_look or self._boxed()
            if not (boxed and self._box.put(self._number, message)):  # type: ignore[union-attr]
                self._store.set(self._key(self._number, self._rank), message)
            if self._box is not None:
                self._box.announce(self._number)
        except BaseException as error:
            raise self._failed(about, error)  # noqa: B904 - from itself, or with its cause
        return functools.partial(self._end, self._number, about, message)

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"

    def _failed(self, about: str, error: BaseException) -> BaseException:
        """Tell peers of ``error``, after which the group agrees on nothing any more; return what to raise."""
        with contextlib.suppress(RuntimeError, ValueError):
            if not self._store.check([self._ended]):
                self._store.set(self._ended, f"{type(error).__name__}: {one_line(error)}")
        if not isinstance(error, (RuntimeError, ValueError)):
            return error
        # The store goes with the process that has it.
        failed = OperatorError(f"{self._who}: {about}: the job's store failed: {one_line(error)}")
        failed.__cause__ = error
        return failed

    def _boxed(self) -> bool:
        """Return True once all ranks look into all boxes."""
        if self._boxes:
            self._all_look = all(box.looks for box in self._boxes.values())
        return self._all_look

    def _find_boxes(self, messages: list[_Message]) -> None:
        """Map the peers' boxes, if all ranks have one on this host."""
        self._boxes, addresses = {}, dict[int, mailbox.Address]()
        for rank, message in zip(self._ranks, messages, strict=True):
            if message.box is not None and message.process[0] == self._process[0] and rank != self._rank:
                addresses[rank] = message.box
        if self._box is None or len(addresses) < len(self._ranks) - 1:  # which all ranks see
            self._box = None
        elif boxes := mailbox.find(list(addresses.values())):
            self._boxes = dict(zip(addresses, boxes, strict=True))
            self._box.look()

    def _end(self, number: int, about: str, mine: bytes) -> list[Any]:
        try:
            pickled = self._wait(number, about, mine)
            messages = [_Message(*pickle.loads(pickled[rank])) for rank in self._ranks]  # noqa: S301 - our own ranks'
            if self._boxes is None:
                self._find_boxes(messages)
        except BaseException as error:
            raise self._failed(about, error)  # noqa: B904 - as in begin
        self._open.discard(number)
        # Whoever has begun this one has begun all before it, and has read those that it has not said to be open.
        unread = frozenset[int]().union(*(message.unread for message in messages))
        for read in [one for one in self._left if one < number and one not in unread]:
            self._left.remove(read)
            if self._box is None or not self._box.free(read):
                self._store.delete_key(self._key(read, self._rank))
        self._left.append(number)
        together, values = True, []
        for rank, message in zip(self._ranks, messages, strict=True):
            together &= message.about == about
            values.append(message.value)
            if rank not in self._peers and message.process[0] == self._process[0] and rank != self._rank:
                try:
                    self._peers[rank] = psutil.Process(message.process[1])
                except psutil.NoSuchProcess:
                    self._peers[rank] = None
        if not together:
            places = "; ".join(f"rank {rank}: {message}" for rank, message in zip(self._ranks, messages, strict=True))
            raise OutOfStepError(
                f"{self._who}: the ranks of this group are at different points of their first calls, as after an error "
                f"that one of them alone has caught ({places}); make the same calls on all ranks"
            )
        return values

    def _read(self, number: int, ranks: list[int]) -> dict[int, bytes]:
        """Return the messages of ``ranks`` that are there, those in the store only together."""
        found, stored = dict[int, bytes](), list[int]()
        for rank in ranks:
            box = (self._boxes or {}).get(rank)
            # Before the look into the slot: what is announced after it may lie there.
            announced = box is None or box.newest >= number
            if box is not None and (message := box.get(number)) is not None:
                found[rank] = message
            elif announced:
                stored.append(rank)
        keys = [self._key(number, rank) for rank in stored]
        if keys and self._store.check(keys):
            # One request for all: the ranks of a large job would wait for each other's at the one server.
            pickled = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            found.update(zip(stored, pickled, strict=True))
        return found

    def _wait(self, number: int, about: str, mine: bytes) -> dict[int, bytes]:
        """Wait for all messages, without holding a lock: other threads use the store, and the interpreter."""
        began = looked = time.monotonic()
        found = {self._rank: mine}
        while True:
            missing = [rank for rank in self._ranks if rank not in found]
            found |= self._read(number, missing)
            if len(found) == len(self._ranks):
                return found
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if self._store.check([self._ended]):
                    raise OperatorError(
                        f"{self._who}: {about}: this group's ranks agree on nothing any more since "
                        f"{self._store.get(self._ended).decode()}"
                    )
                exited = [rank for rank, process in self._peers.items() if process is None or not lives(process)]
                for rank in missing:
                    found |= self._read(number, [rank])
                missing = [rank for rank in missing if rank not in found]
                if lost := [rank for rank in missing if rank in exited]:
                    raise OperatorError(f"{self._who}: {about}: the processes of peer rank(s) {lost} have ended")
                if missing and now - began > self._timeout_s:
                    raise OperatorError(
                        f"{self._who}: {about}: no word from peer rank(s) {missing} for {self._timeout_s:g} s, the "
                        "process group's time-out"
                    )
            if now - began < _SPIN_S:
                os.sched_yield()  # lets other threads run; a sleep of no length takes 0.07 ms
            else:
                overshoot = _OVERSHOOT_BOXED if self._all_look else _OVERSHOOT
                time.sleep(min(overshoot * (now - began), _MAX_PAUSE_S))


class OutOfStepError(OperatorError):
    """Ranks have met in agreements about different things. All of them raise it."""


class TogetherError(OperatorError):
    """A function that all ranks ran has failed on some of them. All of them raise it."""


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreements] = weakref.WeakKeyDictionary()


def begin(value: _Result, group: dist.ProcessGroup, about: str) -> Callable[[], list[_Result]]:
    """Begin :func:`of_all_ranks` and return what ends it, with its result; it waits for nobody. Collective, as the end
    is, which is called once.
    """
    agreements = _agreements.get(group)
    if agreements is None:
        agreements = _agreements[group] = Agreements(group)
    return agreements.begin(value, about)


def of_all_ranks(value: _Result, group: dist.ProcessGroup, about: str = "a comparison") -> list[_Result]:
    """All-gather one small Python object per rank, in rank order; collective, on hosts alone. ``about`` names the
    operator or the piece of work, alike on all ranks. Raises OperatorError: see the module.
    """
    return begin(value, group, about)()


def together(group: dist.ProcessGroup, about: str, work: Callable[[], _Result]) -> list[_Result]:
    """Run ``work()`` on every rank and return all results; collective. Raises TogetherError on all ranks, with the
    causes in words, if it raised on one.
    """
    value: _Result | None = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as raised:
        error = raised
    mine = (value, None if error is None else f"{type(error).__name__}: {one_line(error)}")
    results, errors = zip(*of_all_ranks(mine, group, about), strict=True)
    if causes := "; ".join(f"tp rank {rank}: {why}" for rank, why in enumerate(errors) if why is not None):
        raise TogetherError(f"{about} failed ({causes})") from error
    return list(results)


def first_rank(group: dist.ProcessGroup, about: str, work: Callable[[], _Result]) -> _Result:
    """Run ``work()`` on the first rank of ``group`` alone and return its result on all; collective. Raises
    TogetherError on all ranks if it raised there.
    """
    return together(group, about, work if group.rank() == 0 else lambda: None)[0]  # type: ignore[return-value, arg-type]


def failures(group: dist.ProcessGroup, about: str, error: str | None) -> dict[int, str]:
    """Return the errors of all ranks by global rank; collective. ``error``: this rank's, None if it had none."""
    errors = zip(dist.get_process_group_ranks(group), of_all_ranks(error, group, about), strict=True)
    return {rank: words for rank, words in errors if words is not None}
