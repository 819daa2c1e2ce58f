"""Progress and time-outs of the lanes of a link through host memory.

A wait in a stream has no limit of its own. The lanes write down which call they are in (its *epoch*; nothing else
depends on it) and which batch of words, and the thread that watches time-outs (:mod:`~megatron_flux.comm.timeouts`)
looks a few times a second. When a lane has stood for too long at a wait that is not met, it

1. notes which operator, peer, shard and epoch is waited for, and the last call that this peer has begun;
2. satisfies all words that this rank waits for, so that its streams run empty. What they copy by then is wrong, but at
   the end of the call :func:`~megatron_flux.kernels.device.gate_kernel` ends the process with CUDA's error: nothing
   behind it runs. Peers are not misled: none of the words that they wait for is touched;
3. logs what step 1 noted.

A replayed CUDA graph, a recording of our own too, comes to the same epochs and batches again and again: the epochs in a
message are then of the graphs, and the same unmet wait at every look within the limit, even of different replays,
counts as standing still. On CPUs a lane measures the time itself and raises what step 1 noted.
"""

from __future__ import annotations

import time
import weakref

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
_EPOCHS = 0x7FFFFFFF
"""Epochs count to this and begin again at 0: an alarm has signed words."""
_RELEASE_S = 10.0
_REMEMBERED = 1024
"""Calls to remember; a driver's queues hold fewer."""
_RECORDED = 1 << 14


class Progress:
    """The calls of a link and where its lanes are in them. It outlives the link while a thread looks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, layout: Layout, regions: Regions) -> None:
        self._regions = regions  # must not be unmapped while a thread looks
        self.host = regions.host
        self._layout, self._rank = layout, group.rank()
        self.epoch = 0
        self.calls: dict[int, Program] = {}  # the latest, by epoch
        self._captured: dict[int, Program] = Cache(_RECORDED)
        """Those in CUDA graphs, whose replays write the same epoch again."""
        self.lanes: StreamLanes | None = None
        self.link: object = None
        """Of a GPU: so a link that is dropped is watched, and its memory kept, until the garbage collector comes."""
        self._stood: list[tuple[tuple[int, int], float]] = [((0, 0), 0.0)] * len(LANES)
        weak = weakref.WeakMethod(self.look)
        self.alarm = Alarm(group, device, lambda: (look := weak()) and look())

    def begin(self, call: Program, *, captured: bool = False) -> int:
        """Remember ``call`` and return its epoch. A ``captured`` one may be under way at any time from here on."""
        self.epoch = epoch = (self.epoch + 1) & _EPOCHS
        self.calls.pop((epoch - _REMEMBERED) & _EPOCHS, None)
        (self._captured if captured else self.calls)[epoch] = call
        return epoch

    def gave_up(self, lane: int, wait: Wait) -> Exception:
        """Return the error of a processor lane that has waited too long."""
        self.ring(lane, wait)
        return OperatorError(self.alarm.message())

    def ring(self, lane: int, wait: Wait) -> None:
        """Note that ``lane`` has waited too long, unless another wait has."""
        if not self.alarm.view[0]:
            epoch = self._read(lane, EPOCH)
            call = self._call(epoch)
            begun_by_peer = read(self.host[wait.peer] + BEGUN)
            self.alarm.ring(CODES[call.operator if call else "all_gather"], *wait, epoch, begun_by_peer)

    def look(self) -> None:
        """Ring and release if a lane has stood still for too long."""
        if self.alarm.view[0] == 1:
            return
        for lane in LANES:
            epoch, position, busy = (self._read(lane, what) for what in (EPOCH, POSITION, BUSY))
            call = self._call(epoch)
            if not busy or call is None or position >= len(call.batches[lane]):
                continue
            wait = call.batches[lane][position].unmet()
            if wait is None or self._stood[lane][0] != (epoch, position):
                self._stood[lane] = (epoch, position), time.monotonic()
            elif time.monotonic() - self._stood[lane][1] > self.alarm.seconds:
                self.ring(lane, wait)
                self.release()
                return

    def _read(self, lane: int, what: int) -> int:
        return read(self.host[self._rank] + progress_word(lane, what))

    def _call(self, epoch: int) -> Program | None:
        return self.calls.get(epoch) or self._captured.get(epoch)

    def release(self) -> None:
        """Satisfy every word that this rank waits for until its lanes have run empty, :data:`_RELEASE_S` at most.

        Lanes that are branches of a CUDA graph say themselves that they are busy: the graph may run on any stream.
        """
        layout, rank, lanes = self._layout, self._rank, self.lanes
        busy = [self.host[rank] + progress_word(lane, BUSY) for lane in LANES]
        own = [(self.host[rank] + word, EMPTY) for word in layout.own_words()]
        theirs = [
            (at + word, FULL) for peer, at in enumerate(self.host) if peer != rank for word in layout.words_of(rank)
        ]
        end = time.monotonic() + _RELEASE_S
        while lanes is not None and time.monotonic() < end and not lanes.drained(busy):
            for address, value in own + theirs:
                store(address, value)
            time.sleep(1e-3)
