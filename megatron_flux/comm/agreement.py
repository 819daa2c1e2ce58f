"""Agreement between the ranks of a group on their hosts: one collective, through memory of their host or over the
job's store.

Use it for what a call does once (compare shapes, probe the link, make workspaces, tune), so that no rank raises while
its peers wait. It does not use the group's backend, because where one rank fails before it launches a kernel, its
peers' GPUs already wait for it in theirs, and NCCL's kernels would wait behind those.

Contract
    * The first agreement of a group begins with a *meeting* over the job's store, for which all ranks wait: if all are
      on one host and can open each other's boxes (:class:`Box`), messages go that way from then on, else over the
      store. Boxes only grow, so new ones are made at another meeting every :data:`MEET_EVERY`.
    * Agreements of a group are numbered on each rank as they begin, and each says what it is about. Ranks that meet in
      agreements about different things all raise OutOfStepError with every rank's topic. That happens where one rank
      alone has caught an exception in the middle of a first call and made that call again, or another one. Nobody
      hangs, and the next agreement is in step again: the same call, made again on all ranks, may succeed.
    * Any number may have begun and not ended. A rank waits in one's end for peers to begin the same one, and for
      nothing else: whoever has the lowest number finds that its peers have begun it, in whatever order they end.
    * A message stays in the store until all ranks have read it: each says what it has begun and not ended, whoever has
      begun a later one has read the rest. One that is never ended keeps its key.
    * A peer that does not come within the group's own time-out, or whose process has exited, is an OperatorError that
      names it. A process that exits on the same host is noticed within a second, once it has met the others. Then no
      agreement of the group is possible any more, and each says so at once, on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import secrets
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from megatron_flux.comm.timeouts import group_timeout_s
from megatron_flux.errors import OperatorError, one_line

_Result = TypeVar("_Result")
_Machine = tuple[str, ...]
Address = tuple[int, int, bytes]
"""Where processes of its host find a box: its owner's id and descriptor, and its token."""

MEET_EVERY = 10_000
"""Agreements, of some hundred bytes each, between two meetings of a group that has boxes."""
_LOOK_S = 0.5
_SPIN_S = 0.0001
"""Seconds of a wait that are spent awake: a thread that sleeps wakes up 0.05 to 0.1 ms late."""
_MAX_PAUSE_S = 0.02
_OVERSHOOT, _OVERSHOOT_BOXED = 0.25, 0.1
"""Of the time that a peer is late: how much longer its message may lie in the store, or in a box, before it is
noticed."""


def machine() -> _Machine:
    """Return the scope in which process ids are unique: this boot of this kernel, and its namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:  # a sandbox that hides them
        return (os.uname().nodename,)


def lives(process: psutil.Process) -> bool:
    """Return True if ``process`` has not exited; another process that has its number by now is not it."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class Box:
    """A file in memory to which one rank alone appends its messages, and which its peers read.

    A look into a peer's box takes a microsecond or two; a request to the store takes from 0.1 to 1 ms. The file has no
    name, and is outside /dev/shm with its limit: peers open it as the owner's descriptor, below /proc. The system frees
    it with the last process that has it open, however that ends.

    Hazards
        * Of a message that is just being written a reader may see a part, on processors other than x86 in any order.
          So each has a checksum, over its number too: until that fits, it is not there.
        * A process id may be another process by now, and what is taken for one host may be two. So a file begins with
          a token.
        * A forked child inherits the descriptors: it must not write.
    """

    _HEAD = struct.Struct("=qqI")  # a message's number, length and checksum
    _TOKEN_BYTES = 8

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._at = self._TOKEN_BYTES  # where the next message to read begins
        weakref.finalize(self, os.close, handle).atexit = False

    @classmethod
    def create(cls) -> tuple[Box, Address]:
        """Return a box for the calling rank. Raises OSError."""
        handle, token = os.memfd_create("megatron_flux"), secrets.token_bytes(cls._TOKEN_BYTES)
        box = cls(handle)
        os.write(handle, token)
        return box, (os.getpid(), handle, token)

    @classmethod
    def at(cls, address: Address) -> Box:
        """Return a peer's box. Raises OSError or ValueError."""
        process, there, token = address
        box = cls(os.open(f"/proc/{process}/fd/{there}", os.O_RDONLY))
        if os.pread(box._handle, cls._TOKEN_BYTES, 0) != token:
            raise ValueError(f"descriptor {there} of process {process} is something else")
        return box

    def put(self, number: int, message: bytes) -> None:
        """Append a message."""
        head = self._HEAD.pack(number, len(message), zlib.crc32(message, number & 0xFFFFFFFF))
        os.write(self._handle, head + message)

    def new(self) -> Iterator[tuple[int, bytes]]:
        """Yield what has been appended since the last time, as ``(number, message)``."""
        left = os.fstat(self._handle).st_size - self._at
        data = os.pread(self._handle, left, self._at) if left > 0 else b""
        while len(data) >= (size := self._HEAD.size):
            number, length, checksum = self._HEAD.unpack_from(data)
            message, data = data[size : size + length], data[size + length :]
            if zlib.crc32(message, number & 0xFFFFFFFF) != checksum:
                return
            self._at += size + length
            yield number, message


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
        """Numbers of what has ended, where peers may have to read this rank's message in the store yet."""
        self._peers: dict[int, psutil.Process | None] = {}
        """Peers' processes on this host; None: it has exited."""
        self._box: Box | None = None
        """This rank's box, if messages go that way."""
        self._boxes: dict[int, Box] = {}
        self._came: dict[tuple[int, int], bytes] = {}
        """What has come in boxes, by number and rank."""

    def begin(self, value: Any, about: str, topic: str | None = None) -> Callable[[], list[Any]]:
        """See :func:`begin`; ``topic``: what the message says that it is about, in a meeting."""
        if topic is None and (self._number == 0 or (self._boxes and self._number % MEET_EVERY == 0)):
            self._meet(about)
        self._number = number = self._number + 1
        self._open.add(number)
        try:
            content = about if topic is None else topic, value, frozenset(self._open)
            message = self._came[number, self._rank] = pickle.dumps(content)
            if self._box is not None:
                self._box.put(number, message)
            else:
                self._store.set(self._key(number, self._rank), message)
        except BaseException as error:
            raise self._failed(about, error)  # noqa: B904 - from itself, or with its cause
        return functools.partial(self._end, number, about)

    def _meet(self, about: str) -> None:
        """Find the peers' processes, and open their boxes if all ranks can."""
        own = address = None
        with contextlib.suppress(OSError):  # no memory
            own, address = Box.create()
        here = machine()
        place: tuple[_Machine, int, Address | None] = here, os.getpid(), address
        boxes: dict[int, Box] = {}
        for rank, (where, process, address) in zip(self._ranks, self.begin(place, about, "")(), strict=True):
            if where == here and rank != self._rank:
                try:
                    self._peers[rank] = psutil.Process(process)
                except psutil.NoSuchProcess:
                    self._peers[rank] = None
                with contextlib.suppress(OSError, ValueError):
                    if address is not None:
                        boxes[rank] = Box.at(address)
        mine = own is not None and 0 < len(boxes) == len(self._ranks) - 1
        all_can = all(self.begin(mine, about, "")())
        self._box, self._boxes = (own, boxes) if all_can else (None, {})

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

    def _end(self, number: int, about: str) -> list[Any]:
        """Wait for the messages of all ranks and return their values. Raises OutOfStepError."""
        boxed = self._box is not None
        try:
            found = self._wait(number, about)
            messages = map(pickle.loads, map(found.__getitem__, self._ranks))  # our own ranks'
            topics, values, opened = zip(*messages, strict=True)
        except BaseException as error:
            raise self._failed(about, error)  # noqa: B904 - as in begin
        self._open.discard(number)
        # Whoever has begun this one has begun all before it, and has read those that it has not said to be open.
        unread = frozenset[int]().union(*opened)
        for one in self._left.copy():
            if one < number and one not in unread:
                self._left.remove(one)
                self._store.delete_key(self._key(one, self._rank))
        if not boxed:
            self._left.append(number)
        if len(set(topics)) > 1:
            places = "; ".join(
                f"rank {rank}: {topic} ({value})" if isinstance(value, str) else f"rank {rank}: {topic}"
                for rank, topic, value in zip(self._ranks, topics, values, strict=True)
            )
            raise OutOfStepError(
                f"{self._who}: the ranks of this group are at different points of their first calls, as after an error "
                f"that one of them alone has caught ({places}); make the same calls on all ranks"
            )
        return list(values)

    def _read(self, number: int, found: dict[int, bytes], ranks: list[int]) -> list[int]:
        """Move the messages of ``ranks`` that are there, of the store all or none, to ``found``; return the others."""
        for rank, box in self._boxes.items():
            for one, message in box.new():
                self._came[one, rank] = message
        missing = []
        for rank in ranks:
            if (number, rank) in self._came:
                found[rank] = self._came.pop((number, rank))
            else:
                missing.append(rank)
        if self._boxes or not missing or not self._store.check(keys := [self._key(number, rank) for rank in missing]):
            return missing
        # One request for all: the ranks of a large job would wait for each other's at the one server.
        pickled = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
        found.update(zip(missing, pickled, strict=True))
        return []

    def _wait(self, number: int, about: str) -> dict[int, bytes]:
        """Wait for all messages, without holding a lock: other threads use the store, and the interpreter."""
        began = looked = time.monotonic()
        found: dict[int, bytes] = {}
        missing = self._ranks
        while missing := self._read(number, found, missing):
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                if self._store.check([self._ended]):
                    raise OperatorError(
                        f"{self._who}: {about}: this group's ranks agree on nothing any more since "
                        f"{self._store.get(self._ended).decode()}"
                    )
                exited = [rank for rank, process in self._peers.items() if process is None or not lives(process)]
                missing = [rank for rank in missing if self._read(number, found, [rank])]
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
                overshoot = _OVERSHOOT_BOXED if self._boxes else _OVERSHOOT
                time.sleep(min(overshoot * (now - began), _MAX_PAUSE_S))
        return found


class OutOfStepError(OperatorError):
    """Ranks have met in agreements about different things. All of them raise it."""


class TogetherError(OperatorError):
    """A function that all ranks ran has failed on some of them. All of them raise it."""


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreements] = weakref.WeakKeyDictionary()


def begin(value: _Result, group: dist.ProcessGroup, about: str) -> Callable[[], list[_Result]]:
    """Begin :func:`of_all_ranks` and return what ends it, once; it waits for nobody, but in a meeting. Collective."""
    agreements = _agreements.get(group)
    if agreements is None:
        agreements = _agreements[group] = Agreements(group)
    return agreements.begin(value, about)


def of_all_ranks(value: _Result, group: dist.ProcessGroup, about: str = "a comparison") -> list[_Result]:
    """All-gather one small object per rank; collective. ``about`` is alike on all ranks. Raises OperatorError."""
    return begin(value, group, about)()


def together(group: dist.ProcessGroup, about: str, work: Callable[[], _Result]) -> list[_Result]:
    """Run ``work()`` on every rank and return all results. Raises TogetherError on all ranks if it raised on one."""
    value: _Result | None = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as raised:
        error = raised
    mine = (value, None if error is None else f"{type(error).__name__}: {one_line(error)}")
    results, errors = zip(*of_all_ranks(mine, group, about), strict=True)
    if any(errors):
        causes = "; ".join(f"tp rank {rank}: {why}" for rank, why in enumerate(errors) if why is not None)
        raise TogetherError(f"{about} failed ({causes})") from error
    return list(results)


def first_rank(group: dist.ProcessGroup, about: str, work: Callable[[], _Result]) -> _Result:
    """Run ``work()`` on the first rank of ``group`` alone and return its result, or raise TogetherError, on all."""
    return together(group, about, work if group.rank() == 0 else lambda: None)[0]  # type: ignore[return-value, arg-type]


def failures(group: dist.ProcessGroup, about: str, error: str | None) -> dict[int, str]:
    """Return the errors of all ranks by global rank; collective. ``error``: this rank's, None if it had none."""
    errors = zip(dist.get_process_group_ranks(group), of_all_ranks(error, group, about), strict=True)
    return {rank: words for rank, words in errors if words is not None}
