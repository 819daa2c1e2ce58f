"""Failed waits and failed calls: time-outs of device-side waits, and the poison of what a broken call leaves behind.

A kernel that waits too long writes ``[code, op, peer, unit, epoch, seen]`` into an alarm (pinned host memory) and
traps. The trap ends the process with a CUDA error at its next synchronization; meanwhile a daemon thread logs what was
waited for, and the next operator call raises it as an OperatorError. An exception in the middle of a call poisons the
slab or link it ran on (:func:`poison_on_error`): the same alarm then refuses every further call.

That thread is the only end of some waits (:mod:`~megatron_flux.comm.host_progress`), so nothing may end it or hold it
up: it survives every exception, and leaves writing, which a full disk fails and a full pipe blocks, to other threads.

The limit is ``MEGATRON_FLUX_TIMEOUT_S`` seconds, by default the time-out of the process group's own collectives
(``new_group(timeout=...)``, Megatron's ``--distributed-timeout-minutes``, else 10 minutes with NCCL): a late peer is
waited for as long as stock waits. It is read when a slab is made.

With the default limit the group's watchdog may be first: it ends the process with its own "Watchdog caught collective
operation timeout" of a collective that has not begun, because the kernel before it waits. Set the variable lower than
the group's time-out to have the alarm's line for sure. On a rank that waits in NCCL for one of those ranks, the
watchdog is all there is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import constants

from megatron_flux import settings

OPERATORS = {
    1: "all_gather_gemm",
    2: "gemm_reduce_scatter",
    3: "the start of a call",
    4: "all_gather",
    5: "all_gather_gemm",  # 5 to 7: by :mod:`comm.host_link`
    6: "gemm_reduce_scatter",
    7: "all_gather",
    8: "gemm_all_reduce",
}
"""Names of operators by ``op`` in an alarm; :mod:`megatron_flux.kernels.device` has the codes."""
UNITS = {1: "block", 2: "tile", 3: "call", 4: "shard", 5: "shard", 6: "shard", 7: "shard", 8: "block"}
_MAX_LIMIT = (1 << 63) - 1  # the largest that a kernel can compare with

_POISONED = 2  # in place of the 1 that kernels write first
_MAX_QUOTED = 300  # characters of an exception that a message repeats

_log = logging.getLogger("megatron_flux")
_alarms: weakref.WeakSet[Alarm] = weakref.WeakSet()
_lock = threading.Lock()
"""Held to change the set or to iterate over it: both at once would end the watching thread."""
_timeouts = 0


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the limit in seconds of a wait for peers of ``group``. Raises UserError: the variable is no time."""
    given = settings.timeout_s()
    return group_timeout_s(group, device) if given is None else given


def group_timeout_s(group: dist.ProcessGroup, device: torch.device | None = None) -> float:
    """Return the time-out of the group's own collectives on ``device`` (None: on any that it has)."""
    try:
        return group._get_backend(device or group._device_types[0]).options._timeout.total_seconds()
    except (AttributeError, RuntimeError) as error:  # a backend of another kind, or of another torch
        default = (constants.default_pg_nccl_timeout or constants.default_pg_timeout).total_seconds()
        _log.warning(
            "megatron_flux: the process group does not say its time-out (%s); waits end after torch's default of %g s, "
            "or what MEGATRON_FLUX_TIMEOUT_S says",
            error,
            default,
        )
        return default


def timeouts() -> int:
    """Return the number of this process's waits that have timed out and been noticed."""
    return _timeouts


class Alarm:
    """Six words that kernels of one slab write on a time-out, or that poison."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, look: Callable[[], object] | None = None
    ) -> None:
        """``look`` is called a few times a second beside a GPU, for waits that nothing there limits."""
        self._look = look
        cuda = device.type == "cuda"
        self.words = torch.zeros(8, dtype=torch.int32, pin_memory=cuda)
        self.view = self.words.numpy()  # the same words; the first is not 0 where something went wrong
        self._ranks = ranks = dist.get_process_group_ranks(group)
        self._own = group.rank()
        self._who = f"rank {dist.get_rank()} (tp rank {self._own} of {len(ranks)})"
        self._poison: str | None = None
        self._told = self._counted = False
        self.seconds = timeout_s(group, device)
        self.limit = min(int(self.seconds * 1e9), _MAX_LIMIT)  # nanoseconds
        if cuda:
            self.open()
            _start()

    def message(self) -> str | None:
        """Return what timed out, or which call poisoned; None as long as all is well."""
        if not self.view[0]:
            return None
        if self.view[0] == _POISONED:
            return self._poison
        if not self._counted:
            global _timeouts
            self._counted = True
            _timeouts += 1
        _, op, peer, unit, epoch, seen = (int(v) for v in self.view[:6])
        if peer == self._own:  # megatron_flux.kernels.hopper.split_k
            return (
                f"{self._who}: {OPERATORS.get(op, op)} timed out after {self.seconds:g} s waiting for another part of "
                f"tile {unit}, epoch {epoch}, on its own GPU. Does a kernel hold SMs that does not end?"
            )
        return (
            f"{self._who}: {OPERATORS.get(op, op)} timed out after {self.seconds:g} s waiting for peer rank "
            f"{self._ranks[peer]} (tp rank {peer}), {UNITS.get(op, 'unit')} {unit}, epoch {epoch}; the peer's last "
            f"epoch here is {seen}. Did it die, or make another sequence of calls? The limit is "
            "MEGATRON_FLUX_TIMEOUT_S, or the process group's own time-out"
        )

    def poison(self, operator: str, error: BaseException) -> None:
        """Let :meth:`message` say that ``error`` broke a call of ``operator`` off, unless a wait timed out before."""
        if self.view[0]:
            return
        cause = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:_MAX_QUOTED]
        self._poison = (
            f"{self._who}: a call of {operator} was broken off here by {cause}; its peers still wait for it, and its "
            "workspace is of no use any more: start the job again from its last checkpoint"
        )
        self.view[0] = _POISONED
        self._told = True
        _write(self._poison)

    def ring(self, operator: int, peer: int, unit: int, epoch: int, seen: int) -> None:
        """Note that a wait has lasted too long, as kernels do."""
        self.view[1:6] = operator, peer, unit, epoch, seen
        self.view[0] = 1

    def tell(self) -> None:
        """Look, then log the message once, without waiting for that: what looks ends waits, whatever logging does."""
        try:
            if self._look is not None:
                self._look()
        finally:
            text = self.message()
            if text is not None and not self._told:
                self._told = True
                threading.Thread(target=_write, args=(text,), name="megatron-flux-message", daemon=True).start()

    def open(self) -> None:
        """Watch it for as long as it lives, or until it is closed."""
        with _lock:
            _alarms.add(self)

    def close(self) -> None:
        """Stop watching."""
        with _lock:
            _alarms.discard(self)


class Poisonable(Protocol):
    """A slab or link, which an interrupted call leaves unusable."""

    def poison(self, operator: str, error: BaseException) -> None:
        """Refuse every further call: ``error`` ended one of ``operator`` that had begun."""


class poison_on_error:  # noqa: N801 - a context manager; as a generator it would take three times as long
    """Poison ``work`` if anything in the block, in which a call begins, raises: peers already count on this call."""

    def __init__(self, work: Poisonable, operator: str) -> None:
        """``operator`` is what the error of further calls names."""
        self._work, self._operator = work, operator

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if error is not None:
            self._work.poison(self._operator, error)


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # a log that cannot be written is no reason to leave streams waiting
        _log.error(text)


def _watched() -> list[Alarm]:
    with _lock:
        return list(_alarms)


def _watch() -> None:
    while True:
        time.sleep(0.2)
        for alarm in _watched():
            with contextlib.suppress(Exception):
                alarm.tell()


@functools.cache
def _start() -> None:
    threading.Thread(target=_watch, name="megatron-flux-watch", daemon=True).start()
