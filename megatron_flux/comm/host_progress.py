"""How far the lanes of a link through host memory are, and what is done about one that stands still.

A wait in a stream has no limit of its own. The lanes write down as they go which call they are in (its *epoch*, on
which nothing else depends) and which batch of words, and the thread that watches time-outs
(:mod:`~megatron_flux.comm.timeouts`) looks at that a few times a second. When a lane has stood for too long at a wait
that is not met, it

1. notes which operator, peer, shard and epoch is waited for, and the last call that this peer has begun;
2. satisfies all words that this rank waits for, so that its streams run empty. What they copy by then is wrong, but the
   kernel at the end of the call (:mod:`megatron_flux.kernels.gate`) ends the process with CUDA's error first: nothing
   behind it runs. Peers are not misled: of the words that they wait for, none is touched;
3. logs what step 1 noted.

A CUDA graph that is replayed comes to the same epochs and batches again and again: that every look in the whole limit
met the same wait of another replay, unmet, is taken for standing still.

On CPUs a lane counts the time by itself and raises what step 1 noted.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_flux.comm.host_memory import Regions
from megatron_flux.comm.host_program import LANES, Program
from megatron_flux.comm.host_ring import BEGUN, BUSY, EMPTY, EPOCH, FULL, POSITION, Layout, place
from megatron_flux.comm.lanes import StreamLane, Wait, read, store
from megatron_flux.comm.timeouts import OPERATORS, Alarm
from megatron_flux.errors import OperatorError

CODES = {name: code for code, name in OPERATORS.items() if code >= 5}
"""Of the operators, in alarms of this link."""

_EPOCHS = 0x7FFFFFFF
"""Epochs count to this and begin again at 0: an alarm has signed words."""
_RELEASE_S = 10.0
_REMEMBERED = 1024
"""Calls; the queues of a driver hold fewer."""


class Call(NamedTuple):
    """What is under way."""

    operator: str
    program: Program


class LinkAlarm(Alarm):
    """As of the base class, of waits that nothing on the device limits."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, look: Callable[[], None]) -> None:
        """``look``: called a few times a second where there is a GPU."""
        self._look = look
        super().__init__(group, device)

    @property
    def seconds(self) -> float:
        """How long a wait may last."""
        return self._seconds

    def ring(self, operator: str, wait: Wait, epoch: int, seen: int) -> None:
        """Say that ``wait`` has lasted too long."""
        self.view[1:6] = CODES[operator], wait.peer, wait.shard, epoch, seen
        self.view[0] = 1

    def tell(self) -> None:
        """Look after the waits first, which releases them: it must not depend on whether the message can be written."""
        try:
            self._look()
        finally:
            super().tell()


class Progress:
    """See the module. It outlives the link while a lane runs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, regions: Regions) -> None:
        """Of a link that begins."""
        self.regions = regions
        self.keep: object = None  # other memory that lanes are at work on
        self.epoch = 0
        self.calls: dict[int, Call] = {}  # the last ones, by epoch
        self._captured: dict[int, Call] = {}  # in CUDA graphs, which write the same epoch in every replay
        self.release: Callable[[], None] = lambda: None
        self._own = regions.host[group.rank()]
        self._stood: list[tuple[tuple[int, int], float]] = [((0, 0), 0.0)] * len(LANES)
        found = weakref.ref(self)

        def look() -> None:
            progress = found()
            if progress is not None:
                progress.look()

        self.alarm = LinkAlarm(group, device, look)

    def _read(self, lane: int, what: int) -> int:
        return read(self._own + place(lane, what))

    def begin(self, call: Call, *, captured: bool = False) -> int:
        """Remember what may be under way, and return its epoch; a call that is ``captured`` may be so at any time from
        here on.
        """
        self.epoch = epoch = (self.epoch + 1) & _EPOCHS
        self.calls.pop((epoch - _REMEMBERED) & _EPOCHS, None)
        (self._captured if captured else self.calls)[epoch] = call
        return epoch

    def _call(self, epoch: int) -> Call | None:
        return self.calls.get(epoch) or self._captured.get(epoch)

    def seen(self, peer: int) -> int:
        """The last call that ``peer`` has begun."""
        return read(self.regions.host[peer] + BEGUN)

    def gave_up(self, lane: int) -> Callable[[Wait], Exception]:
        """What a processor's lane raises."""

        def error(wait: Wait) -> Exception:
            self.ring(lane, wait)
            return OperatorError(self.alarm.message())

        return error

    def ring(self, lane: int, wait: Wait) -> None:
        """Lane ``lane`` has waited too long."""
        if not self.alarm.view[0]:
            epoch = self._read(lane, EPOCH)
            call = self._call(epoch)
            self.alarm.ring(call.operator if call else "all_gather", wait, epoch, self.seen(wait.peer))

    def look(self) -> None:
        """Whether a lane has stood still for too long; called a few times a second."""
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


def release(layout: Layout, rank: int, host: Sequence[int], lanes: Sequence[StreamLane]) -> None:
    """Satisfy every word that this rank waits for until its lanes have run empty, or :data:`_RELEASE_S` are over."""
    mine = [(host[rank] + word, EMPTY) for word in layout.own_words()]
    theirs = [(at + word, FULL) for peer, at in enumerate(host) if peer != rank for word in layout.words_of(rank)]
    end = time.monotonic() + _RELEASE_S
    while time.monotonic() < end and not all(lane.drained() for lane in lanes):
        for address, value in mine + theirs:
            store(address, value)
        time.sleep(1e-3)
