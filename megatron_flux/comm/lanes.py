"""Lanes: queues of copies and of waits for words, in the order in which they were enqueued.

The link through host memory (:mod:`megatron_flux.comm.host_link`) has two: one down, from the device to host memory,
and one up. What is in one runs in order; between the two, words decide. On GPUs a lane is a CUDA stream
(:class:`StreamLane`): copies by copy engine, words by the GPU's front end (:mod:`megatron_flux.cuda_memory_ops`), no
SM. On CPUs it is the processor (:class:`ProcessorLane`): with a thread for each, or at once where it is called.

Hazards
    * With one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``) all lanes and the caller's stream may be *one* queue:
      a wait at its head holds back everything that was enqueued after it, in whatever stream. So the whole order in
      which a rank enqueues must be free of deadlocks, not that of each lane alone. ``ProcessorLane(threaded=False)`` is
      this case at its strictest: nothing is enqueued before everything earlier has ended. Tests run on both.
    * A wait may be enqueued before what satisfies it only if that is enqueued by another rank, or into another queue.
    * A driver's queue is finite: enqueuing may itself wait. What is said of one queue holds for that too.
    * On CPUs data and word are ordered by the processor (x86 keeps the order of stores); they are for tests.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from megatron_flux import cuda_memory_ops as memory_ops
from megatron_flux.cuda_memory_ops import WAIT, WRITE, WordOp


class Wait(NamedTuple):
    """What a wait is for: the rank (within the group) that ends it, and which of its shards it is about."""

    peer: int
    shard: int


class Batch:
    """Memory operations that go into a lane together. ``waits`` has an entry for each operation that waits."""

    __slots__ = ("_table", "at", "count", "stamped", "waits")

    def __init__(self, operations: Sequence[WordOp], waits: Sequence[Wait] = (), stamped: Sequence[int] = ()) -> None:
        """In this order; the values of those in ``stamped`` (by place) are what :meth:`stamp` says."""
        self.waits, self.stamped = tuple(waits), tuple(stamped)
        self._table = memory_ops.table(operations)
        self.at, self.count = self._table.ctypes.data, len(operations)

    def stamp(self, number: int) -> None:
        """Let ``number`` be what the next use writes."""
        for place in self.stamped:
            self._table[place, memory_ops.VALUE] = number

    @property
    def operations(self) -> list[WordOp]:
        """As they are now."""
        return [WordOp(*row) for row in self._table[:, : memory_ops.VALUE + 1].tolist()]

    def unmet(self) -> Wait | None:
        """The first wait whose word has another value now."""
        waiting = (operation for operation in self.operations if operation.kind == WAIT)
        for operation, wait in zip(waiting, self.waits, strict=True):
            if read(operation.address) != operation.value:
                return wait
        return None


class Lane(Protocol):
    """See the module."""

    def words(self, batch: Batch) -> None:
        """Enqueue ``batch``."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue a copy."""

    def after(self, other: Lane) -> None:
        """What comes from here on comes behind what ``other``, a lane of the same kind, has been given by now."""

    def mark(self) -> Callable[[], None]:
        """What puts the stream that is current when it is called behind all that the lane has been given by now. On
        CPUs it waits; OperatorError: the lane has ended with an error.
        """

    def hold(self, tensor: torch.Tensor) -> None:
        """The memory of ``tensor`` may go to others only when the lane has done what it was given by now."""


def follow(lanes: Sequence[Lane]) -> Callable[[], None]:
    """What puts ``lanes`` behind all that the caller has enqueued on its current stream by now. On CPUs nothing: what
    the caller has done, it has done.
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


def read(address: int) -> int:
    """The word at ``address``."""
    return ctypes.c_uint32.from_address(address).value


def store(address: int, value: int) -> None:
    """Write the word at ``address`` (``value`` modulo 2 ** 32)."""
    ctypes.c_uint32.from_address(address).value = value & 0xFFFFFFFF


class StreamLane:
    """A CUDA stream of its own. Addresses are those of the device, of registered host memory among others."""

    def __init__(self, device: torch.device) -> None:
        """On ``device``."""
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._handle, self._device = self.stream.cuda_stream, device

    def words(self, batch: Batch) -> None:
        """See :class:`Lane`."""
        memory_ops.enqueue(batch.at, batch.count, self._handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See :class:`Lane`."""
        memory_ops.copy(target, source, nbytes, self._handle)

    def mark(self) -> Callable[[], None]:
        """See :class:`Lane`."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return lambda: event.wait(torch.cuda.current_stream(self._device))

    def after(self, other: Lane) -> None:
        """See :class:`Lane`."""
        assert isinstance(other, StreamLane)  # noqa: S101 - a link's lanes are of one kind
        self.stream.wait_stream(other.stream)

    def hold(self, tensor: torch.Tensor) -> None:
        """See :class:`Lane`."""
        tensor.record_stream(self.stream)

    def drained(self) -> bool:
        """Whether all that was enqueued has run, well or not."""
        try:
            return self.stream.query()
        except RuntimeError:  # CUDA has failed
            return True


_POLL_S = 5e-5


class _Worker:
    """What runs the operations of a :class:`ProcessorLane`; the lane itself may be dropped meanwhile."""

    def __init__(self, gave_up: Callable[[Wait], Exception], seconds: float, keep: object) -> None:
        self.queue: SimpleQueue[Callable[[], object] | threading.Event | None] = SimpleQueue()
        self.error: BaseException | None = None
        self._gave_up, self._seconds, self._keep = gave_up, seconds, keep

    def run(self) -> None:
        """The thread. After an error nothing is done any more, but marks are reached."""
        while (item := self.queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self.one(item)

    def one(self, operation: Callable[[], object]) -> None:
        """Do it, unless there was an error."""
        if self.error is None:
            try:
                operation()
            except BaseException as error:
                self.error = error

    def words(self, operations: Sequence[WordOp], waits_for: Sequence[Wait]) -> None:
        """Wait and write."""
        waits = iter(waits_for)
        for kind, address, value in operations:
            if kind == WRITE:
                store(address, value)
            else:
                self._wait(address, value, next(waits))

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
    """The processor: in a thread of its own, or (not ``threaded``) wherever it is called."""

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
        """See :class:`Lane`."""
        self._put(functools.partial(self._worker.words, batch.operations, batch.waits))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """See :class:`Lane`."""
        self._put(functools.partial(ctypes.memmove, target, source, nbytes))

    def mark(self) -> Callable[[], None]:
        """See :class:`Lane`."""
        worker, reached = self._worker, threading.Event()
        if not self._threaded:
            return lambda: None
        worker.queue.put(reached)

        def wait() -> None:
            reached.wait()
            if worker.error is not None:
                raise worker.error

        return wait

    def after(self, other: Lane) -> None:
        """See :class:`Lane`. The other ends its waits, with an error if need be."""
        assert isinstance(other, ProcessorLane)  # noqa: S101 - a link's lanes are of one kind
        if self._threaded:
            reached = threading.Event()
            other._worker.queue.put(reached)
            self._put(reached.wait)

    def hold(self, tensor: torch.Tensor) -> None:
        """See :class:`Lane`: the queue keeps it."""
        self._put(functools.partial(id, tensor))

    def _put(self, operation: Callable[[], object]) -> None:
        worker = self._worker
        if self._threaded:
            worker.queue.put(operation)
            return
        worker.one(operation)
        if worker.error is not None:
            raise worker.error
