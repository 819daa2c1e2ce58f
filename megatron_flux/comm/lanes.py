"""Lanes: in-order queues of copies and of waits for words in host memory.

The link through host memory (:mod:`megatron_flux.comm.host_link`) has two: one down, from the device to host memory,
and one up. Operations within a lane run in order; between the two, words decide. On GPUs a lane is a CUDA stream
(:class:`StreamLane`): copies by copy engine, words by the GPU's front end (:mod:`megatron_flux.cuda_memory_ops`), no
SM. On CPUs it is the processor (:class:`ProcessorLane`): one thread per lane, or the caller itself.

Hazards
    * With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all lanes and the caller's stream may be *one* queue:
      a wait at its head holds back everything that was enqueued after it, in whatever stream. So the whole order in
      which a rank enqueues must be free of deadlocks, not that of each lane alone. ``ProcessorLane(threaded=False)`` is
      the strictest form of this case: nothing is enqueued before everything earlier has ended. Tests run both.
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
from typing import Any, NamedTuple

import torch

from megatron_flux import cuda_memory_ops as memory_ops
from megatron_flux.cuda_memory_ops import WAIT, WRITE, WordOp

_POLL_S = 5e-5


class Wait(NamedTuple):
    """The rank (within the group) that ends a wait, and the rank whose shard it is about."""

    peer: int
    shard: int


class Batch:
    """Memory operations that are enqueued together. ``waits`` has an entry for each operation that waits."""

    __slots__ = ("_table", "address", "count", "stamped", "waits")

    def __init__(self, operations: Sequence[WordOp], waits: Sequence[Wait] = (), stamped: Sequence[int] = ()) -> None:
        """``stamped``: indices of the operations whose values :meth:`stamp` sets."""
        self.waits, self.stamped = tuple(waits), tuple(stamped)
        self._table = memory_ops.table(operations)
        self.address, self.count = self._table.ctypes.data, len(operations)

    def stamp(self, number: int) -> None:
        """Set the value that the next use writes."""
        for index in self.stamped:
            self._table[index, memory_ops.VALUE] = number

    @property
    def operations(self) -> list[WordOp]:
        """The operations with their current values."""
        return [WordOp(*row) for row in self._table[:, : memory_ops.VALUE + 1].tolist()]

    def unmet(self) -> Wait | None:
        """Return the first wait whose word still has another value."""
        waiting = (operation for operation in self.operations if operation.kind == WAIT)
        for operation, wait in zip(waiting, self.waits, strict=True):
            if read(operation.address) != operation.value:
                return wait
        return None


def read(address: int) -> int:
    """Read the word at ``address``."""
    return ctypes.c_uint32.from_address(address).value


def store(address: int, value: int) -> None:
    """Write the word at ``address`` (``value`` modulo 2 ** 32)."""
    ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF


class StreamLane:
    """A CUDA stream of its own. Addresses are device addresses, those of registered host memory included."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream on ``device``."""
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._handle, self._device = self.stream.cuda_stream, device

    def words(self, batch: Batch) -> None:
        """Enqueue ``batch``."""
        memory_ops.enqueue(batch.address, batch.count, self._handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy."""
        memory_ops.copy(target, source, nbytes, self._handle)

    def mark(self) -> Callable[[], None]:
        """Return a function that makes the then current stream wait for all that the lane has been given by now."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return lambda: event.wait(torch.cuda.current_stream(self._device))

    def after(self, other: Any) -> None:
        """Run what follows here behind what ``other``, a lane of the same kind, has been given by now."""
        self.stream.wait_stream(other.stream)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the memory of ``tensor`` until the lane has done what it was given by now."""
        tensor.record_stream(self.stream)

    def drained(self) -> bool:
        """Return True if all that was enqueued has run, successfully or not."""
        try:
            return self.stream.query()
        except RuntimeError:  # CUDA has failed
            return True


class _Worker:
    """Runs a :class:`ProcessorLane`'s operations. The lane itself may be dropped meanwhile."""

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


class ProcessorLane:
    """The processor: a thread of its own, or (not ``threaded``) the caller. Same methods as :class:`StreamLane`."""

    def __init__(
        self, gave_up: Callable[[Wait], Exception], seconds: float, *, threaded: bool, keep: object = None
    ) -> None:
        """``gave_up`` makes the error of a wait that has lasted ``seconds``; ``keep`` owns the memory."""
        self._worker = worker = _Worker(gave_up, seconds, keep)
        self._threaded = threaded
        if threaded:
            threading.Thread(target=worker.run, name="megatron-flux-lane", daemon=True).start()
            weakref.finalize(self, worker.queue.put, None).atexit = False

    def words(self, batch: Batch) -> None:
        """Enqueue ``batch``."""
        self._put(functools.partial(self._worker.words, batch.operations, batch.waits))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy."""
        self._put(functools.partial(ctypes.memmove, target, source, nbytes))

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for the lane; it raises OperatorError if the lane has ended with an error."""
        if not self._threaded:
            return lambda: None
        worker, reached = self._worker, self._reached()

        def wait() -> None:
            reached.wait()
            if worker.error is not None:
                raise worker.error

        return wait

    def after(self, other: Any) -> None:
        """Run what follows here behind what ``other``, a lane of the same kind, has been given by now."""
        if self._threaded:
            self._put(other._reached().wait)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep ``tensor`` until the lane has done what it was given by now."""
        self._put(functools.partial(id, tensor))

    def _reached(self) -> threading.Event:
        reached = threading.Event()
        self._worker.queue.put(reached)
        return reached

    def _put(self, operation: Callable[[], object]) -> None:
        worker = self._worker
        if self._threaded:
            worker.queue.put(operation)
            return
        worker.one(operation)
        if worker.error is not None:
            raise worker.error


Lane = StreamLane | ProcessorLane
"""A lane. A link has lanes of one kind only."""


def follow(lanes: Sequence[Lane]) -> Callable[[], None]:
    """Return a function that puts ``lanes`` behind what the caller's current stream has been given by now. On CPUs it
    does nothing: what the caller has done, it has done.
    """
    streams = [lane.stream for lane in lanes if isinstance(lane, StreamLane)]
    if not streams:
        return lambda: None
    event = torch.cuda.Event()
    event.record()

    def wait() -> None:
        for stream in streams:
            event.wait(stream)

    return wait
