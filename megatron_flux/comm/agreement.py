"""Agreements between the hosts of a group: one collective, over the job's store, for all that is done a first time.

Use them for what a call does once (compare shapes, probe the link, make workspaces, tune), so that no rank raises while
its peers wait:

* :func:`of_all_ranks`: all-gather one small Python object per rank.
* :func:`together`: do a piece of work on every rank; it succeeds on all of them or raises on all of them.
* :func:`first_rank`: do a piece of work on the first rank only (files) and broadcast its result *or its error*.
* :func:`failures`: on which ranks something that all have just tried has failed.

Why the store and not the group's backend: where one rank fails before it launches a kernel, its peers' GPUs already
wait for it in theirs, and NCCL's kernels would wait behind those.

Contract
    * Agreements of a group are numbered on each rank, and each says what it is about. Ranks that meet in agreements
      about different things all raise OperatorError with every rank's words. That happens where one rank alone has
      caught an exception in the middle of a first call and made that call again, or another one. Nobody hangs, and the
      next agreement is in step again: the same call, made again on all ranks, may succeed.
    * A peer that does not come within the group's own time-out, or whose process has ended, is an OperatorError that
      names it. A process that ends on the same host is noticed within a second, once it has taken part in an agreement.
      Then no agreement of the group is possible any more, and each says so at once, on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch.distributed as dist

from megatron_flux.comm.timeouts import group_timeout_s
from megatron_flux.errors import OperatorError, one_line

_Result = TypeVar("_Result")

_LOOK_S = 0.5
"""Seconds between two looks at the peers' processes."""
_LONGEST_PAUSE_S = 0.02


def machine() -> tuple[str, ...]:
    """Return what process ids are unique in: this boot of this kernel, and its namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return boot.read_text().strip(), os.readlink(space)
    except OSError:  # no Linux
        return (os.uname().nodename,)


def lives(process: psutil.Process) -> bool:
    """Return True if ``process`` has not ended; a number that another process has by now is not it."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


class _Word(NamedTuple):
    about: str
    process: tuple[tuple[str, ...], int]  # its machine and id
    value: Any

    def __str__(self) -> str:
        return f"{self.about} ({self.value})" if isinstance(self.value, str) else self.about


class Agreements:
    """The calling rank's place in the agreements of one group."""

    def __init__(self, group: dist.ProcessGroup, name: str | None = None) -> None:
        """Nothing is communicated but that this rank is here. ``name``: that of the group, if not its own."""
        self._store = dist.distributed_c10d._get_default_store()
        self._ranks, self._me = dist.get_process_group_ranks(group), dist.get_rank()
        self._who = f"rank {self._me} (tp rank {group.rank()} of {len(self._ranks)})"
        self._timeout_s = group_timeout_s(group)
        # Groups that were split from one may share a name; so may a group that is made again, which must not read what
        # the one before has left.
        name = f"megatron_flux/{name or group.group_name}/{min(self._ranks)}"
        self._name = f"{name}/{-(-self._store.add(f'{name}/made', 1) // len(self._ranks))}"
        self._ended = f"{self._name}/ended"
        self._turn = 0
        self._process = machine(), os.getpid()
        self._peers: dict[int, psutil.Process | None] = {}
        """Those that can be looked at from here; None: it has ended."""

    def of_all_ranks(self, mine: Any, about: str) -> list[Any]:
        """See :func:`of_all_ranks`."""
        self._turn += 1
        try:
            self._store.set(self._key(self._me), pickle.dumps(_Word(about, self._process, mine)))
            self._wait(about)
            keys = [self._key(rank) for rank in self._ranks]
            # One request for all: the ranks of a large job would wait for each other's at the one server.
            said = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            words: list[_Word] = [pickle.loads(word) for word in said]  # noqa: S301 - peers' own
        except BaseException as error:
            failed = isinstance(error, (RuntimeError, ValueError))
            with contextlib.suppress(RuntimeError, ValueError):
                if not self._store.check([self._ended]):
                    self._store.set(self._ended, f"{type(error).__name__}: {one_line(error)}")
            if failed:  # the store goes with the process that has it
                raise OperatorError(f"{self._who}: {about}: the job's store failed: {one_line(error)}") from error
            raise
        if self._turn > 1:
            self._store.delete_key(self._key(self._me, self._turn - 1))  # everybody has read it: all are in this turn
        for rank, word in zip(self._ranks, words, strict=True):
            if rank not in self._peers and word.process[0] == self._process[0] and rank != self._me:
                try:
                    self._peers[rank] = psutil.Process(word.process[1])
                except psutil.NoSuchProcess:
                    self._peers[rank] = None
        if any(word.about != about for word in words):
            places = "; ".join(f"rank {rank}: {word}" for rank, word in zip(self._ranks, words, strict=True))
            raise OperatorError(
                f"{self._who}: the ranks of this group are at different points of their first calls, as after an error "
                f"that one of them alone has caught ({places}); make the same calls on all ranks"
            )
        return [word.value for word in words]

    def _key(self, rank: int, turn: int | None = None) -> str:
        return f"{self._name}/{self._turn if turn is None else turn}/{rank}"

    def _wait(self, about: str) -> None:
        """Wait for everybody's word, without holding the store's lock: other threads use it too."""
        keys = {rank: self._key(rank) for rank in self._ranks}
        began, looked, pause = time.monotonic(), 0.0, 0.0005
        while not self._store.check(list(keys.values())):
            if (now := time.monotonic()) - looked > _LOOK_S:
                looked = now
                if self._store.check([self._ended]):
                    raise OperatorError(
                        f"{self._who}: {about}: this group's ranks agree on nothing any more since "
                        f"{self._store.get(self._ended).decode()}"
                    )
                ended = [rank for rank, process in self._peers.items() if process is None or not lives(process)]
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                if gone := [rank for rank in missing if rank in ended]:
                    raise OperatorError(f"{self._who}: {about}: the processes of peer rank(s) {gone} have ended")
                if now - began > self._timeout_s:
                    raise OperatorError(
                        f"{self._who}: {about}: no word from peer rank(s) {missing} for {self._timeout_s:g} s, the "
                        "process group's time-out"
                    )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


class TogetherError(OperatorError):
    """Work that all ranks did has failed on some of them. All of them raise it."""


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Agreements] = weakref.WeakKeyDictionary()


def of_group(group: dist.ProcessGroup) -> Agreements:
    """Return the agreements of ``group``."""
    if group not in _made:
        _made[group] = Agreements(group)
    return _made[group]


def of_all_ranks(mine: _Result, group: dist.ProcessGroup, about: str = "a comparison") -> list[_Result]:
    """All-gather one small Python object per rank, in rank order; collective, on hosts alone. ``about`` names the
    operator or the piece of work, alike on all ranks. Raises OperatorError: see the module.
    """
    return of_group(group).of_all_ranks(mine, about)


def together(group: dist.ProcessGroup, about: str, work: Callable[[], _Result]) -> list[_Result]:
    """Return what ``work()`` returns on every rank; collective. Raises TogetherError: it raised on a rank; on all of
    them, with the causes in words.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as raised:
        error = raised
    said = of_all_ranks((value, None if error is None else f"{type(error).__name__}: {one_line(error)}"), group, about)
    if failed := {rank: why for rank, (_, why) in enumerate(said) if why is not None}:
        words = "; ".join(f"tp rank {rank}: {why}" for rank, why in failed.items())
        raise TogetherError(f"{about} failed ({words})") from error
    return [value for value, _ in said]  # type: ignore[misc]


def first_rank(group: dist.ProcessGroup, about: str, work: Callable[[], _Result]) -> _Result:
    """Return what ``work()`` returns on the first rank of ``group``, which alone calls it; collective. Raises
    TogetherError: it raised there; on all ranks.
    """
    return together(group, about, work if group.rank() == 0 else lambda: None)[0]  # type: ignore[return-value]


def failures(group: dist.ProcessGroup, about: str, mine: str | None) -> dict[int, str]:
    """Return what failed by global rank; collective. ``mine`` says what failed on this rank, None if nothing did."""
    said = zip(dist.get_process_group_ranks(group), of_all_ranks(mine, group, about), strict=True)
    return {rank: words for rank, words in said if words is not None}
