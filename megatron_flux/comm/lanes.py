"""Lanes: in-order queues of copies and of waits for words in host memory.

The link through host memory (:mod:`megatron_flux.comm.host_link`) has two: one down, from the device to host memory,
and one up. Operations within a lane run in order; between the two, words decide. On GPUs a lane is a CUDA stream
(:class:`StreamLanes`): copies by copy engine, words by the GPU's front end (:mod:`megatron_flux.cuda_memory_ops`), no
SM. On CPUs it is the processor (:class:`ProcessorLanes`): one thread per lane, or the caller itself.

Hazards
    * With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all lanes and the caller's stream may be *one* queue:
      a wait at its head holds back everything that was enqueued after it, in whatever stream. So the whole order in
      which a rank enqueues must be free of deadlocks, not that of each lane alone. ``ProcessorLanes`` by the caller are
      the strictest form of it: nothing is enqueued before everything earlier has ended. Tests run both.
    * A wait may be enqueued before what satisfies it only if that is enqueued by another rank, or into another queue.
    * A driver's queue is finite: enqueuing may itself wait, with the same consequences.
    * On CPUs data and word are ordered by the processor (x86 keeps the order of stores).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux import cuda_memory_ops as memory_ops
from megatron_flux.cuda_memory_ops import WAIT, WRITE, Copy, WordOp

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
        self.table = memory_ops.table(operations)

    @property
    def operations(self) -> list[WordOp]:
        """The operations with their current values."""
        return [WordOp(*row) for row in self.table[:, : memory_ops.VALUE + 1].tolist()]

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
        """Create the streams on ``device``."""
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

    def laid_out(self, steps: Sequence[Enqueued], caller: int = 0, *, recorded: bool = False) -> list[memory_ops.Call]:
        """Return ``steps`` as :meth:`run` takes them; ``caller``: handle of the caller's stream. ``recorded``: for a
        recording, whose lanes begin behind what :meth:`mark_earlier` has marked before each replay.
        """
        found: list[memory_ops.Call] = []
        event, streams = self._between.cuda_event, [*self._handles, caller]
        for step in steps:
            if isinstance(step, Step):
                stream, copies = streams[step.lane], step.copies
                found.append(memory_ops.call_of(step.batch.table, stream, copies, from_slots=step.lane == UP))
            elif isinstance(step, Mark):
                found.append(memory_ops.record_of(event, streams[step.lane]))
            else:
                found += [memory_ops.wait_of(streams[lane], event) for lane in step.lanes]
                if recorded and step.lanes == LANES:  # once in a call, at the begin of both
                    waits = zip(LANES, self._earlier, strict=True)
                    found += [memory_ops.wait_of(streams[at], one.cuda_event, external=True) for at, one in waits]
        return found

    run = staticmethod(memory_ops.run)

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


class _Worker:
    """Runs a lane of :class:`ProcessorLanes`, which may be dropped meanwhile."""

    def __init__(self, gave_up: Callable[[Wait], Exception], seconds: float, keep: object) -> None:
        self.queue: SimpleQueue[Callable[[], object] | threading.Event | None] = SimpleQueue()
        self.error: BaseException | None = None
        self._gave_up, self._seconds, self._keep = gave_up, seconds, keep

    def run(self) -> None:
        """Run the queue in a thread. After an error no operation runs any more, but marks are reached."""
        while (item := self.queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self.one(item)

    def one(self, operation: Callable[[], object]) -> None:
        """Run ``operation``, unless there was an error."""
        if self.error is None:
            try:
                operation()
            except BaseException as error:
                self.error = error

    def words(self, operations: Sequence[WordOp], waits: Sequence[Wait]) -> None:
        """Wait and write."""
        pending = iter(waits)
        for kind, address, value in operations:
            if kind == WRITE:
                store(address, value)
            else:
                self._wait(address, value, next(pending))

    def _wait(self, address: int, value: int, wait: Wait) -> None:
        word = ctypes.c_uint32.from_address(address)
        deadline = None
        while word.value != value:
            if deadline is None:
                deadline = time.monotonic() + self._seconds
            elif time.monotonic() > deadline:
                raise self._gave_up(wait)
            time.sleep(_POLL_S)


class ProcessorLanes:
    """The processor: a thread for each lane, or (not ``threaded``) the caller. Same methods as :class:`StreamLanes`."""

    def __init__(
        self, gave_up: Callable[[int], Callable[[Wait], Exception]], seconds: float, *, threaded: bool, keep: object
    ) -> None:
        """``gave_up(lane)`` makes the error of a wait that has lasted ``seconds``; ``keep`` owns the memory."""
        self._workers = [_Worker(gave_up(lane), seconds, keep) for lane in LANES]
        self._threaded = threaded
        self._noted: tuple[int, threading.Event | None] = CALLER, None
        for worker in self._workers if threaded else ():
            threading.Thread(target=worker.run, name="megatron-flux-lane", daemon=True).start()
            weakref.finalize(self, worker.queue.put, None).atexit = False

    def laid_out(self, steps: Sequence[Enqueued], caller: int = 0, *, recorded: bool = False) -> Sequence[Enqueued]:
        """Return ``steps`` as :meth:`run` takes them."""
        return steps

    def run(self, steps: Sequence[Enqueued], rows: Sequence[int]) -> None:
        """Enqueue ``steps`` for a tensor whose rows, and behind them what is sent, are at the addresses ``rows``."""
        for step in steps:
            if isinstance(step, Mark):
                self._noted = self.mark(step.lane)
                continue
            if isinstance(step, Behind):
                for lane in step.lanes:
                    self.behind(self._noted, lane)
                continue
            lane, batch, copies = step
            self._put(lane, functools.partial(self._workers[lane].words, batch.operations, batch.waits))
            for row, offset, slot, nbytes in copies:
                at = rows[row] + offset
                ends = (at, slot) if lane == UP else (slot, at)
                self._put(lane, functools.partial(ctypes.memmove, *ends, nbytes))

    def current(self) -> int:
        """Return the same for every caller."""
        return 0

    def mark(self, lane: int) -> tuple[int, threading.Event | None]:
        """Note what ``lane`` has been given by now, for :meth:`behind`. What the caller has done, it has done."""
        return lane, self._reached(lane) if self._threaded and lane != CALLER else None

    def behind(self, mark: tuple[int, threading.Event | None], lane: int) -> None:
        """Put ``lane`` behind what was noted. Raises OperatorError if that is the caller, and the lane that was noted
        has ended with an error.
        """
        noted, reached = mark
        if reached is None:
            return
        if lane != CALLER:
            self._put(lane, reached.wait)
            return
        reached.wait()
        if (error := self._workers[noted].error) is not None:
            raise error

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` until what is on its way down by now has been read."""
        self._put(DOWN, functools.partial(id, tensor))

    def _reached(self, lane: int) -> threading.Event:
        reached = threading.Event()
        self._workers[lane].queue.put(reached)
        return reached

    def _put(self, lane: int, operation: Callable[[], object]) -> None:
        worker = self._workers[lane]
        if self._threaded:
            worker.queue.put(operation)
            return
        worker.one(operation)
        if worker.error is not None:
            raise worker.error
