"""Progress and time-outs of the lanes of a link through host memory.

A wait in a stream has no limit of its own. The lanes write down which call they are in (its *epoch*; nothing else
depends on it) and which batch of words, and the thread that watches time-outs (:mod:`~megatron_flux.comm.timeouts`)
looks a few times a second. When a lane has stood for too long at a wait that is not met, it

1. notes which operator, peer, shard and epoch is waited for, and the last call that this peer has begun;
2. satisfies all words that this rank waits for, so that its streams run empty. What they copy by then is wrong, but the
   kernel at the end of the call (:mod:`megatron_flux.kernels.gate`) ends the process with CUDA's error first: nothing
   behind it runs. Peers are not misled: none of the words that they wait for is touched;
3. logs what step 1 noted.

A CUDA graph that is replayed, a recording of our own too, comes to the same epochs and batches again and again: the
epochs in a message are then of the graphs. If every look within the limit meets the same wait unmet, even of different
replays, that counts as standing still.

On CPUs a lane measures the time itself and raises what step 1 noted.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm.group_state import Cache
from megatron_flux.comm.host_schedule import (
    BEGUN,
    BUSY,
    EMPTY,
    EPOCH,
    FULL,
    POSITION,
    Layout,
    Program,
    progress_word,
)
from megatron_flux.comm.lanes import LANES, StreamLanes, Wait, read, store
from megatron_flux.comm.shared_memory import Regions
from megatron_flux.comm.timeouts import OPERATORS, Alarm
from megatron_flux.errors import OperatorError

CODES = {name: code for code, name in OPERATORS.items() if code >= 5}
"""Operator codes in this link's alarms."""
_EPOCHS = 0x7FFFFFFF
"""Epochs count to this and begin again at 0: an alarm has signed words."""
_RELEASE_S = 10.0
_REMEMBERED = 1024
"""Calls to remember; a driver's queues hold fewer."""


_RECORDED = 1 << 14


class Call(NamedTuple):
    """A call that may be under way."""

    operator: str
    program: Program


class LinkAlarm(Alarm):
    """Alarm for waits that nothing on the device limits."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, look: Callable[[], None]) -> None:
        """``look`` is called a few times a second where there is a GPU."""
        self._look = look
        super().__init__(group, device)

    @property
    def seconds(self) -> float:
        """Limit of a wait."""
        return self._seconds

    def ring(self, operator: str, wait: Wait, epoch: int, seen: int) -> None:
        """Note that ``wait`` has lasted too long."""
        self.view[1:6] = CODES[operator], wait.peer, wait.shard, epoch, seen
        self.view[0] = 1

    def tell(self) -> None:
        """Release waits first, then log: the release must not depend on whether the message can be written."""
        try:
            self._look()
        finally:
            super().tell()


class Progress:
    """The calls of a link and where its lanes are in them. It outlives the link while a lane runs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, regions: Regions) -> None:
        """Start at epoch 0."""
        self.regions = regions
        self.keep: object = None  # other memory that lanes are at work on
        self.epoch = 0
        self.calls: dict[int, Call] = {}  # the latest, by epoch
        self._captured: dict[int, Call] = Cache(_RECORDED)  # in CUDA graphs, whose replays write the same epoch again
        self.release: Callable[[], None] = lambda: None
        self._own = regions.host[group.rank()]
        self._stood: list[tuple[tuple[int, int], float]] = [((0, 0), 0.0)] * len(LANES)
        weak = weakref.ref(self)

        def look() -> None:
            progress = weak()
            if progress is not None:
                progress.look()

        self.alarm = LinkAlarm(group, device, look)

    def begin(self, call: Call, *, captured: bool = False) -> int:
        """Remember ``call`` and return its epoch. A ``captured`` one may be under way at any time from here on."""
        self.epoch = epoch = (self.epoch + 1) & _EPOCHS
        self.calls.pop((epoch - _REMEMBERED) & _EPOCHS, None)
        (self._captured if captured else self.calls)[epoch] = call
        return epoch

    def gave_up(self, lane: int) -> Callable[[Wait], Exception]:
        """Return the function that makes the error of processor lane ``lane``."""

        def error(wait: Wait) -> Exception:
            self.ring(lane, wait)
            return OperatorError(self.alarm.message())

        return error

    def ring(self, lane: int, wait: Wait) -> None:
        """Note that ``lane`` has waited too long, unless another wait has."""
        if not self.alarm.view[0]:
            epoch = self._read(lane, EPOCH)
            call = self._call(epoch)
            begun_by_peer = read(self.regions.host[wait.peer] + BEGUN)
            self.alarm.ring(call.operator if call else "all_gather", wait, epoch, begun_by_peer)

    def look(self) -> None:
        """Ring and release if a lane has stood still for too long."""
        if self.alarm.view[0] == 1:
            return
        for lane in LANES:
            epoch, position, busy = (self._read(lane, what) for what in (EPOCH, POSITION, BUSY))
            call = self._call(epoch)
            if not busy or call is None or position >= len(call.program.batches[lane]):
                continue
            wait = call.program.batches[lane][position].unmet()
            if wait is None or self._stood[lane][0] != (epoch, position):
                self._stood[lane] = (epoch, position), time.monotonic()
            elif time.monotonic() - self._stood[lane][1] > self.alarm.seconds:
                self.ring(lane, wait)
                self.release()
                return

    def _read(self, lane: int, what: int) -> int:
        return read(self._own + progress_word(lane, what))

    def _call(self, epoch: int) -> Call | None:
        return self.calls.get(epoch) or self._captured.get(epoch)


def release(layout: Layout, rank: int, host: Sequence[int], lanes: StreamLanes) -> None:
    """Satisfy every word that this rank waits for until its lanes have run empty, :data:`_RELEASE_S` at most.

    Lanes that are branches of a CUDA graph say themselves that they are busy: the graph may run on any stream.
    """
    busy = [host[rank] + progress_word(lane, BUSY) for lane in LANES]
    own = [(host[rank] + word, EMPTY) for word in layout.own_words()]
    peers = [(at + word, FULL) for peer, at in enumerate(host) if peer != rank for word in layout.words_of(rank)]
    end = time.monotonic() + _RELEASE_S
    while time.monotonic() < end and not lanes.drained(busy):
        for address, value in own + peers:
            store(address, value)
        time.sleep(1e-3)
