"""Lanes: in-order queues of copies and of waits for words in host memory.

The link through host memory (:mod:`megatron_flux.comm.host_link`) has two: one down, from the device to host memory,
and one up. Operations within a lane run in order; between the two, words decide. On GPUs a lane is a CUDA stream
(:class:`StreamLanes`): copies by copy engine, words by the GPU's front end, no SM. On CPUs it is the caller's thread
(:class:`ProcessorLanes`).

Hazards
    * With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all lanes and the caller's stream may be *one* queue:
      a wait at its head holds back everything that was enqueued after it, in whatever stream. So the whole order in
      which a rank enqueues must be free of deadlocks, not that of each lane alone. ``ProcessorLanes`` are the strictest
      form of it: nothing is enqueued before everything earlier has ended.
    * A wait may be enqueued before what satisfies it only if that is enqueued by another rank, or into another queue.
    * A driver's queue is finite: enqueuing may itself wait, with the same consequences.
    * On CPUs data and word are ordered by the processor (x86 keeps the order of stores).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.cuda_driver import VALUE, WAIT, WRITE, Copy, WordOp

DOWN, UP = LANES = (0, 1)
"""Lanes: from the device to host memory, and back."""
CALLER = 2
"""In place of a lane: the caller, on GPUs its current stream."""
_POLL_S = 5e-5


class Wait(NamedTuple):
    """The rank (within the group) that ends a wait, and the rank whose shard it is about."""

    peer: int
    shard: int


class Batch:
    """Memory operations that are enqueued together. ``waits`` has an entry for each operation that waits."""

    __slots__ = ("stamped", "table", "waits")

    def __init__(self, operations: Sequence[WordOp], waits: Sequence[Wait] = (), stamped: Sequence[int] = ()) -> None:
        """``stamped``: rows of ``table`` whose values each use sets anew."""
        self.waits, self.stamped = tuple(waits), tuple(stamped)
        self.table = driver.table(operations)

    @property
    def operations(self) -> list[WordOp]:
        """The operations with their current values."""
        return [WordOp(*row) for row in self.table[:, : VALUE + 1].tolist()]

    def unmet(self) -> Wait | None:
        """Return the first wait whose word still has another value."""
        waiting = (operation for operation in self.operations if operation.kind == WAIT)
        for operation, wait in zip(waiting, self.waits, strict=True):
            if read(operation.address) != operation.value:
                return wait
        return None


class Step(NamedTuple):
    """A batch of memory operations and the copies behind it, in one lane."""

    lane: int
    batch: Batch
    copies: tuple[Copy, ...]


class Mark(NamedTuple):
    """Notes what ``lane`` (or :data:`CALLER`) has been given by now, for :class:`Behind`."""

    lane: int


class Behind(NamedTuple):
    """Puts ``lanes``, each of which may be :data:`CALLER`, behind what was noted last."""

    lanes: tuple[int, ...]


Enqueued = Step | Mark | Behind


def read(address: int) -> int:
    """Read the word at ``address``."""
    return ctypes.c_uint32.from_address(address).value


def store(address: int, value: int) -> None:
    """Write the word at ``address`` (``value`` modulo 2 ** 32)."""
    ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF


class StreamLanes:
    """A CUDA stream for each lane. Addresses are device addresses, those of registered host memory included."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in LANES]
        self._handles = [stream.cuda_stream for stream in self._streams]
        self._between = self._event()
        """What was noted last; what was enqueued to wait for it does not see that it is used again."""
        self._events: list[torch.cuda.Event] = []
        """Others that no call will wait for any more."""
        self._earlier = [self._event() for _ in LANES]
        """What lanes in recordings wait for: the end of earlier calls."""

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._streams[UP])  # it has no handle before
        return event

    def laid_out(self, steps: Sequence[Enqueued], caller: int = 0, *, recorded: bool = False) -> list[driver.Call]:
        """Return ``steps`` as :meth:`run` takes them; ``caller``: handle of the caller's stream. ``recorded``: for a
        recording, whose lanes begin behind what :meth:`mark_earlier` has marked before each replay.
        """
        found: list[driver.Call] = []
        event, streams = self._between.cuda_event, [*self._handles, caller]
        for step in steps:
            if isinstance(step, Step):
                stream, copies = streams[step.lane], step.copies
                found.append(driver.call_of(step.batch.table, stream, copies, from_slots=step.lane == UP))
            elif isinstance(step, Mark):
                found.append(driver.record_of(event, streams[step.lane]))
            else:
                found += [driver.wait_of(streams[lane], event) for lane in step.lanes]
                if recorded and step.lanes == LANES:  # once in a call, at the begin of both
                    waits = zip(LANES, self._earlier, strict=True)
                    found += [driver.wait_of(streams[at], one.cuda_event, external=True) for at, one in waits]
        return found

    run = staticmethod(driver.run)

    def current(self) -> int:
        """Return the handle of the caller's current stream."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def mark(self, lane: int) -> torch.cuda.Event:
        """Note what ``lane`` has been given by now, for :meth:`behind`."""
        return self.mark_of(self.current() if lane == CALLER else self._handles[lane])

    def mark_of(self, stream: int) -> torch.cuda.Event:
        """Note what ``stream`` (a handle) has been given by now, for :meth:`behind`."""
        event = self._events.pop() if self._events else self._event()
        driver.record(event.cuda_event, stream)
        return event

    def mark_earlier(self, stream: int | None) -> None:
        """Mark what has been given to ``stream`` by now, or to both lanes if it is None."""
        for event, lane in zip(self._earlier, self._handles, strict=True):
            driver.record(event.cuda_event, lane if stream is None else stream)

    def behind_earlier(self) -> None:
        """Put both lanes behind what was marked."""
        for event, lane in zip(self._earlier, self._handles, strict=True):
            driver.wait(lane, event.cuda_event)

    def behind(self, mark: torch.cuda.Event, lane: int) -> None:
        """Put ``lane`` behind what was noted. A mark serves once."""
        driver.wait(self.current() if lane == CALLER else self._handles[lane], mark.cuda_event)
        self._events.append(mark)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the memory of ``tensor`` until what is on its way down by now has been read."""
        tensor.record_stream(self._streams[DOWN])

    def drained(self, busy: Sequence[int] = ()) -> bool:
        """Return True if all that was enqueued has run, and the words at ``busy`` are 0, or if CUDA has failed."""
        try:
            return all(stream.query() for stream in self._streams) and not any(map(read, busy))
        except RuntimeError:  # CUDA has failed
            return True


class ProcessorLanes:
    """Both lanes in the caller's thread: what is enqueued has run. Same methods as :class:`StreamLanes`."""

    def __init__(self, gave_up: Callable[[int, Wait], Exception], seconds: float) -> None:
        """``gave_up`` makes the error of a lane's wait that has lasted ``seconds``."""
        self._gave_up, self._seconds = gave_up, seconds

    def laid_out(self, steps: Sequence[Enqueued], caller: int = 0, *, recorded: bool = False) -> list[Step]:
        """Return ``steps`` as :meth:`run` takes them; there is nothing to put in order."""
        return [step for step in steps if isinstance(step, Step)]

    def run(self, steps: Sequence[Step], rows: Sequence[int]) -> None:
        """Run ``steps`` for a tensor whose rows, and behind them what is sent, are at the addresses ``rows``."""
        for lane, batch, copies in steps:
            waits = iter(batch.waits)
            for kind, address, value in batch.operations:
                if kind == WRITE:
                    store(address, value)
                else:
                    self._wait(lane, address, value, next(waits))
            for row, offset, slot, nbytes in copies:
                at = rows[row] + offset
                ctypes.memmove(*((at, slot) if lane == UP else (slot, at)), nbytes)

    def _wait(self, lane: int, address: int, value: int, wait: Wait) -> None:
        end = time.monotonic() + self._seconds
        while read(address) != value:
            if time.monotonic() > end:
                raise self._gave_up(lane, wait)
            time.sleep(_POLL_S)

    def current(self) -> int:
        """Return the same for every caller."""
        return 0

    def mark(self, lane: int) -> None:
        """Note nothing."""

    def behind(self, mark: None, lane: int) -> None:
        """Wait for nothing."""

    def hold(self, tensor: torch.Tensor) -> None:
        """Nothing is on its way."""
