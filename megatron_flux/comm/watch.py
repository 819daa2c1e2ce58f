"""Time-outs of device-side waits, told to people.

A kernel that waits too long writes ``[code, op, peer, unit, epoch, seen]`` into an alarm (pinned host memory) and
traps. The trap ends the process with a CUDA error at its next synchronization; a daemon thread reads the alarm
meanwhile and prints what was waited for, and the next operator call raises it as an OperatorError.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist

OPERATORS = {1: "all_gather_gemm", 2: "gemm_reduce_scatter", 3: "entering a captured call", 4: "all_gather"}
UNITS = {1: "block", 2: "tile", 3: "call", 4: "shard"}
DEFAULT_TIMEOUT_S = 120.0
POLLS_PER_SECOND = 2000  # of the CPU twin

_POISONED = 2
"""In place of the 1 that kernels write first."""
_SAID = 300
"""Characters of an exception that a message repeats."""

_log = logging.getLogger("megatron_flux")
_alarms: weakref.WeakSet[Alarm] = weakref.WeakSet()
_lock = threading.Lock()
"""Around changes of the set and walks through it: one beside the other would end the watching thread."""
_timeouts = 0
_thread: threading.Thread | None = None


def timeout_s() -> float:
    """Seconds a device-side wait may last: ``MEGATRON_FLUX_TIMEOUT_S``, default 120.

    Keep it below the process group's own time-out, which does not see these waits.
    """
    return float(os.environ.get("MEGATRON_FLUX_TIMEOUT_S", DEFAULT_TIMEOUT_S))


def timeouts() -> int:
    """Waits of this process that have run into their limit and been noticed."""
    return _timeouts


class Alarm:
    """Six words that kernels of one slab write on a time-out."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Allocate the words where both the device and the host can reach them."""
        cuda = device.type == "cuda"
        self.words = torch.zeros(8, dtype=torch.int32, pin_memory=cuda)
        self._view = self.words.numpy()
        self._rank = dist.get_rank()
        self._tp_rank = group.rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._poison: str | None = None
        self._told = False
        self._counted = False
        self.limit = int(timeout_s() * (1e9 if cuda else POLLS_PER_SECOND))
        if cuda:
            self.open()
            _start()

    def message(self) -> str | None:
        """What was waited for in vain, or which call was broken off; None as long as all is well."""
        if not self._view[0]:
            return None
        if self._view[0] == _POISONED:
            return self._poison
        if not self._counted:
            global _timeouts
            self._counted = True
            _timeouts += 1
        _, op, peer, unit, epoch, seen = (int(v) for v in self._view[:6])
        return (
            f"rank {self._rank} (tp rank {self._tp_rank} of {len(self._ranks)}): {OPERATORS.get(op, op)} timed out "
            f"after {timeout_s():g} s waiting for peer rank {self._ranks[peer]} (tp rank {peer}), "
            f"{UNITS.get(op, 'unit')} {unit}, epoch {epoch}; the peer's last epoch here is {seen}. Did it die, or make "
            "another sequence of calls? The limit is MEGATRON_FLUX_TIMEOUT_S"
        )

    def poison(self, operator: str, error: BaseException) -> None:
        """From here on :meth:`message` says that ``error`` broke a call of ``operator`` off, unless it says something.

        It is in the word that kernels write, so that whoever asks for a message looks at one thing.
        """
        if self._view[0]:
            return
        said = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
        self._poison = (
            f"rank {self._rank} (tp rank {self._tp_rank} of {len(self._ranks)}): a call of {operator} was broken off "
            f"here by {said[:_SAID]}; its peers still wait for it, and its workspace is of no use any more: start the "
            "job again from its last checkpoint"
        )
        self._view[0] = _POISONED
        self._told = True
        _log.error(self._poison)

    def tell(self) -> None:
        """Print the message once."""
        text = self.message()
        if text is not None and not self._told:
            self._told = True
            _log.error(text)
            print(text, file=sys.stderr, flush=True)

    def open(self) -> None:
        """Have it watched for as long as it lives, or until it is closed."""
        with _lock:
            _alarms.add(self)

    def close(self) -> None:
        """Stop watching."""
        with _lock:
            _alarms.discard(self)


def _watched() -> list[Alarm]:
    with _lock:
        return list(_alarms)


def _watch() -> None:
    while True:
        time.sleep(0.2)
        for alarm in _watched():
            alarm.tell()


def _start() -> None:
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_watch, name="megatron-flux-watch", daemon=True)
        _thread.start()
