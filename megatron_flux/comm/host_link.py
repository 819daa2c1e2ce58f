"""The link through host memory: moves rows between the ranks of one host, without peer access and without SMs.

For operators that multiply block by block (:mod:`megatron_flux.ops.backends.chunked`). A link knows bytes and peers, no
matrices. In a *gather* every rank sends one block of bytes to all its peers; in an *exchange* each peer a block of its
own, one after the other.

Blocks move in *pieces*, cut at the same offsets on all ranks, so that a GEMM can begin with the first rows that are
here, and end soon after the last. What a rank sends goes by copy engine into slots of its region of shared memory, and
from there into its peers' GPUs. :mod:`~megatron_flux.comm.host_schedule` has what lies where and what is enqueued in
which order, :mod:`~megatron_flux.comm.lanes` the queues, :mod:`~megatron_flux.comm.host_progress` the time-outs.

Contract
    * All ranks of a group make the same calls with the same sizes in the same order, as for any collective. A call
      begins on the current stream (on CPUs: at once). Calls are finished in the order in which they began.
    * Tensors are contiguous. What is sent must not change, and where it arrives not be read, until the call
      says so. The link keeps both alive.
    * A call that cannot be finished raises :class:`~megatron_flux.errors.OperatorError` at its next step or in the next
      call, with rank, operator and peers. An exception in between must poison the link
      (:func:`~megatron_flux.comm.timeouts.poison_on_error`): peers would wait for bytes that never come, and the next
      call would take one step for another.
    * Slots and words are as they were when a call has ended on all ranks, so calls need no numbers but for time-outs.

Hazards
    * **A late reader must never read a slot that is used again.** The writer waits for EMPTY from *every* reader before
      it copies; a reader writes EMPTY only behind its copy, in stream order. Both go through the uses of a slot in the
      same order, from call to call too: all calls begin with slot 0 of a ring that is empty, or will be.
    * **One hardware queue for all streams**: the order of everything that is enqueued must be free of deadlocks; see
      :mod:`~megatron_flux.comm.host_schedule`. Transfers of an exchange are enqueued behind the GEMM of the next step,
      which one queue would otherwise hold back until they have ended.
    * **What stands before a wait on the caller's stream.** The lanes follow the caller's stream where they read what it
      writes; it follows them where it reads what they write, and at the end of a call. Peers' work is waited for
      through words alone.
    * **Host time.** Each chunk costs two driver calls in each lane, about 3 us each (2 x H200). All but addresses of
      tensors is laid out once for all calls of a size on a stream.
    * **CUDA graphs** may hold calls: all that is enqueued depends on nothing but sizes. In which order a graph's
      branches reach the hardware is not specified: ``tests/gpu/checks_host.py`` passed on two H100s with one queue and
      with eight. The shared memory whose addresses a graph holds is never given back.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm import host_schedule, shared_memory
from megatron_flux.comm.agreement import together
from megatron_flux.comm.group_state import Cache
from megatron_flux.comm.host_progress import Progress
from megatron_flux.comm.host_schedule import Layout, Program, default_layout
from megatron_flux.comm.lanes import CALLER, LANES, ProcessorLanes, StreamLanes
from megatron_flux.errors import OperatorError

_numbers = itertools.count()


class Side:
    """Where recordings are made (:mod:`megatron_flux.ops.recordings`), and run beside the stream that they are for."""

    def __init__(self, device: torch.device) -> None:
        """Make a stream, and a pool for the memory that recordings allocate."""
        self.stream, self._event = torch.cuda.Stream(device), torch.cuda.Event()
        self._event.record(self.stream)  # it has no handle before
        self.event, self.handle = self._event.cuda_event, self.stream.cuda_stream
        word = torch.zeros(1, device=device)
        # torch gives up a pool with the last graph that has it. This one stays.
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._graph.capture_begin(capture_error_mode="thread_local")
            word.zero_()
            self._graph.capture_end()
        self.pool = self._graph.pool()


class HostLink:
    """The link of one group; see the module."""

    kind = "host"
    through = "host memory"
    captures = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, layout: Layout | None = None) -> None:
        """Collective. Raises UserError if there is no shared memory for it, or not enough."""
        self._cuda = device.type == "cuda"
        self.rank, self.tp = group.rank(), group.size()
        self.device = device = torch.device("cuda", device.index or 0) if self._cuda else device
        self.layout = layout or default_layout(self.tp)
        self._regions = shared_memory.make_regions(group, self.layout.region_bytes, device)
        self._progress = progress = Progress(group, device, self.layout, self._regions)
        self.alarm = progress.alarm
        self._programs: Cache[tuple[str, str, tuple[int, ...], int, bool], Program] = Cache()
        self._latest: HostCall | None = None
        """Keeps the operands of a call that was broken off: lanes may be at work on them."""
        self.lanes: Any = None
        self.number = next(_numbers)
        self._replayed_on: int | None = None
        """The stream of the latest call if that was replayed. Else lanes are behind all replays."""
        self._sides: dict[tuple[int, str], Side] = {}
        self._recording = False
        self.before: torch.cuda.Event | None = None
        """Where the latest call begins, for :mod:`megatron_flux.ops.recordings`."""

        def make_lanes() -> None:
            if self._cuda:
                from megatron_flux.kernels import launch
                from megatron_flux.kernels.device import gate_kernel

                self.lanes = progress.lanes = StreamLanes(device)
                progress.link = self
                words, constants = (self.alarm.words,), {"CPU": False, "num_warps": 1}
                self._gate = functools.partial(launch.launch, {}, "gate", gate_kernel, 1, words, constants, {}, device)
            else:
                self.lanes = ProcessorLanes(progress.gave_up, self.alarm.seconds)

        # Nobody waits for a peer that could not make its own.
        together(group, f"making the link through {self.through}", make_lanes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that this rank owns."""
        return self.layout.region_bytes

    def gather(self, operator: str, local: torch.Tensor, gathered: torch.Tensor, cuts: Sequence[int]) -> HostCall:
        """Send ``local`` (``nbytes``) to all peers; peer ``p``'s arrives in ``gathered``, ``p * nbytes`` from its
        begin. The part of this rank is left alone. ``cuts``: where pieces begin, and ``nbytes``.
        """
        call = self._begin("gather", operator, local, gathered, cuts)
        call.send()  # what it reads and writes is kept alive by now
        return call

    def exchange(self, operator: str, sent: torch.Tensor, received: torch.Tensor, cuts: Sequence[int]) -> HostCall:
        """Send each peer ``p`` a block of ``nbytes``, which is in ``sent``, ``p * nbytes`` from its begin; what it
        sends arrives in ``received`` as of a gather.
        """
        return self._begin("exchange", operator, sent, received, cuts)

    def poison(self, operator: str, error: BaseException) -> None:
        """Refuse all further calls: ``error`` ended a call of ``operator`` that has begun."""
        self.alarm.poison(operator, error)
        for lane in LANES:  # what the caller does with the operands' memory comes behind them
            with contextlib.suppress(Exception):
                self.lanes.behind(self.lanes.mark(lane), CALLER)

    def end(self, call: HostCall) -> None:
        """End ``call`` on the current stream: nothing behind the gate runs if a wait was given up."""
        if self._latest is call:
            self._latest = None
        if self._cuda:
            self._gate()

    def side(self, beside: str) -> Side:
        """Return the side of the current stream for recordings of an operator ``beside`` it, or, "", on it."""
        key = self.lanes.current(), beside
        if key not in self._sides:
            self._sides[key] = Side(self.device)
        return self._sides[key]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Begin calls in a recording: their lanes are behind the calls before each replay, not before the recording."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def replay(self, graph: torch.cuda.CUDAGraph, stream: int) -> None:
        """Replay a call on the current stream, which has the handle ``stream``."""
        self.lanes.mark_earlier(self._replayed_on)
        self._replayed_on = stream
        graph.replay()

    def check(self) -> None:
        """Raise OperatorError if a call was broken off."""
        if self.alarm.view[0]:
            raise OperatorError(self.alarm.message())

    def _begin(
        self, kind: str, operator: str, sent: torch.Tensor, received: torch.Tensor, cuts: Sequence[int]
    ) -> HostCall:
        """Count a call; nothing is enqueued."""
        here = self.lanes.current()
        key = kind, operator, tuple(cuts), here, self._recording
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._build(kind, cuts)
            program.operator = operator
            laid_out = functools.partial(self.lanes.laid_out, caller=here, recorded=self._recording)
            program.lay_out(laid_out, exchange=kind == "exchange")
        self.check()
        captured = self._cuda and torch.cuda.is_current_stream_capturing()
        if captured:
            self._regions.never_free()
        elif self._replayed_on is not None:
            self.lanes.mark_earlier(self._replayed_on)
            self.lanes.behind_earlier()
            self._replayed_on = None
        program.stamp(self._progress.begin(program, captured=captured))
        self._latest = call = HostCall(self, program, sent, received, here)
        return call

    def _build(self, kind: str, cuts: Sequence[int]) -> Program:
        return host_schedule.program(self.layout, self.rank, self._regions.lanes, cuts, exchange=kind == "exchange")


class HostCall:
    """A call that has begun. Iterate over a gather, on the stream that it began on and to the end, for pieces as they
    arrive; in an exchange :meth:`send` once for each of ``steps``, in that order.
    """

    def __init__(self, link: HostLink, program: Program, sent: torch.Tensor, received: torch.Tensor, here: int) -> None:
        self._link, self._program, self._here = link, program, here
        self._sent, self._received = sent, received  # kept alive
        first, nbytes = received.data_ptr(), program.nbytes
        self._rows = [*range(first, first + link.tp * nbytes, nbytes), sent.data_ptr()]
        self._next = iter(program.laid_out)
        self._marks: list[Any] = []
        self._finished = False

    def send(self) -> None:
        """Enqueue the next part: of a gather, what can leave before anything is waited for; of an exchange, the next
        step's bytes, which the current stream has written. They are enqueued when the next step's are there: their GEMM
        comes first in a queue that they share.
        """
        self._link.lanes.run(next(self._next), self._rows)

    def enqueue(self) -> None:
        """Begin all that is left, and do not wait for it."""
        if not self._marks and not self._finished:
            lanes = self._link.lanes
            lanes.run(itertools.chain.from_iterable(self._next), self._rows)
            self._marks = [lanes.mark(lane) for lane in LANES]

    def wait(self) -> None:
        """Put the current stream behind the whole call. May be called more than once."""
        if self._finished:
            return
        lanes, program = self._link.lanes, self._program
        if not self._marks and lanes.current() == self._here:
            lanes.run(itertools.chain(*self._next, program.read, program.sent), self._rows)
        else:
            self.enqueue()
            for mark in self._marks:
                lanes.behind(mark, CALLER)
            if lanes.current() != self._here:  # the stream that this memory was allocated on does not wait
                lanes.hold(self._sent)
        self._finished = True
        self._link.end(self)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield ``(peer, piece)`` in order of arrival; the current stream is behind it then."""
        run, program, rows = self._link.lanes.run, self._program, self._rows
        for part, laid_out in zip(program.parts[1:], self._next, strict=True):
            run((*laid_out, *program.read), rows)
            yield from part.pieces
        run(program.sent, rows)
        self._finished = True
        self._link.end(self)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """``(peer, piece)`` of each block."""
        return self._program.pieces
