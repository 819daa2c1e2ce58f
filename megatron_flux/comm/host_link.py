"""The link through host memory: for GPUs of one host without peer access, and for CPUs.

What a rank sends goes by copy engine into slots of its region of shared memory, and from there into its peers' GPUs. No
SM takes part. In a gather every rank copies its block to host memory once and all peers read it; in an exchange each
pair has slots of its own. The parts:

* :mod:`~megatron_flux.comm.host_memory`: the memory; :mod:`~megatron_flux.comm.host_ring`: what lies where in it;
* :mod:`~megatron_flux.comm.lanes`: the queues that copies and waits go into;
* :mod:`~megatron_flux.comm.host_program`: what goes into them, in which order, laid out once for all calls of a size;
* :mod:`~megatron_flux.comm.host_progress`: time-outs.

Contract: that of :mod:`~megatron_flux.comm.transport`. Slots and words are as they were when a call has ended on all
ranks, so calls need no numbers but for time-outs.

Hazards
    * **A late reader must never read a slot that is used again.** The writer waits for EMPTY from *every* reader before
      it copies; a reader writes EMPTY only behind its copy, in stream order. Both go through the uses of a slot in the
      same order, from call to call too: all calls begin with slot 0 of a ring that is empty, or will be.
    * **One hardware queue for all streams**: the order of everything that is enqueued must be free of deadlocks; see
      the order in :mod:`~megatron_flux.comm.host_program`. Transfers of an exchange are enqueued behind the GEMM of the
      next step, which one queue would otherwise hold back until they have ended.
    * **What stands before a wait on the caller's stream.** The lanes follow the caller's stream where they read what it
      writes; it follows them where it reads what they write, and at the end of a call. Peers' work is never waited for
      but through words.
    * **Host time.** Each chunk costs a call of the driver for its words and one for its copy in each lane, about 3 us
      each (2 x H200). Words go in batches whose arguments are made once. Larger slots mean fewer calls.
    * **CUDA graphs** may hold calls: all that is enqueued depends on nothing but sizes. The order in which a graph's
      branches reach the hardware is not ours to say. One trial on two H200s, of two lanes each way, ended with one
      queue and with eight, with late ranks and eager calls between replays; the check of ``tests/gpu/checks_host.py``
      has not run. The shared memory whose addresses a graph holds is never given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux import settings
from megatron_flux.comm import host_memory, host_program, transport
from megatron_flux.comm.agreement import together
from megatron_flux.comm.host_program import DOWN, LANES, UP, Program, Step
from megatron_flux.comm.host_progress import Call, LinkAlarm, Progress, release
from megatron_flux.comm.host_ring import Layout, usual
from megatron_flux.comm.lanes import Lane, ProcessorLane, StreamLane, follow
from megatron_flux.comm.slab import Cache
from megatron_flux.errors import OperatorError


class HostLink:
    """See the module; one per group."""

    kind = "host"
    through = "host memory"
    captures = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        layout: Layout | None = None,
        *,
        one_queue: bool | None = None,
    ) -> None:
        """Collective. ``one_queue``: on CPUs, whether one queue takes everything (None: as settings say of CUDA's).
        Raises UserError: there is no shared memory for it, or not enough.
        """
        self.rank, self.tp, self.device = group.rank(), group.size(), device
        self.layout = layout or usual(self.tp)
        regions = host_memory.make(group, self.layout.region_bytes, device)
        self._progress = progress = Progress(group, device, regions)
        self._at = regions.lanes
        self._programs: Cache[tuple[str, tuple[int, ...]], Program] = Cache()
        self._last: HostGather | HostExchange | None = None
        """Keeps the operands of a call that was broken off: lanes may be at work on them."""
        self._lanes: list[Lane] = []

        def make_lanes() -> None:
            if device.type == "cuda":
                streams = [StreamLane(device) for _ in LANES]
                self._lanes = [*streams]
                progress.release = lambda: release(self.layout, self.rank, regions.host, streams)
                self._gates: dict[Any, Any] = {}
            else:
                seconds, one = progress.alarm.seconds, settings.one_queue() if one_queue is None else one_queue
                self._lanes = [
                    ProcessorLane(progress.gave_up(lane), seconds, threaded=not one, keep=progress) for lane in LANES
                ]

        # Nobody waits for a peer that could not make its own.
        together(group, f"making the link through {self.through}", make_lanes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of this rank's own."""
        return self.layout.region_bytes

    @property
    def alarm(self) -> LinkAlarm:
        """Of its waits."""
        return self._progress.alarm

    def gather(self, operator: str, mine: torch.Tensor, theirs: torch.Tensor, cuts: Sequence[int]) -> HostGather:
        """See :class:`~megatron_flux.comm.transport.Transport`."""
        program = self._program("gather", cuts)
        self._begin(operator, program, LANES)
        self._last = HostGather(self, program, mine, theirs)
        self._last.begin()
        return self._last

    def exchange(self, operator: str, theirs: torch.Tensor, cuts: Sequence[int]) -> HostExchange:
        """See :class:`~megatron_flux.comm.transport.Transport`."""
        program = self._program("exchange", cuts)
        self._begin(operator, program, (UP,))
        self._last = HostExchange(self, program, theirs, cuts)
        return self._last

    def broken_off(self, operator: str, error: BaseException) -> None:
        """See :class:`~megatron_flux.comm.transport.Transport`."""
        self.alarm.poison(operator, error)
        if self.device.type == "cuda":  # what the caller does with the operands' memory comes behind the lanes
            for lane in self._lanes:
                with contextlib.suppress(Exception):
                    lane.mark()()

    def _begin(self, operator: str, program: Program, behind: Sequence[int]) -> None:
        """The lanes ``behind`` come behind what the caller has enqueued by now."""
        if self.alarm.view[0]:
            raise OperatorError(self.alarm.message())
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured:
            self._progress.regions.never_free()
        program.stamp(self._progress.begin(Call(operator, program), captured=captured))
        self.follow(behind)()

    def run(self, steps: Sequence[Step], rows: Sequence[int]) -> None:
        """Enqueue ``steps``; ``rows``: addresses on the device, what is sent last."""
        lanes = self._lanes
        for number, batch, copies, after in steps:
            lane = lanes[number]
            if after is not None:
                lane.after(lanes[after])
            lane.words(batch)
            for row, offset, host, nbytes in copies:
                if number == DOWN:
                    lane.copy(host, rows[row] + offset, nbytes)
                else:
                    lane.copy(rows[row] + offset, host, nbytes)

    def behind(self, numbers: Sequence[int]) -> Callable[[], None]:
        """What puts the stream that is current when it is called behind what these lanes have been given by now."""
        marks = [self._lanes[number].mark() for number in numbers]

        def wait() -> None:
            for mark in marks:
                mark()

        return wait

    def follow(self, numbers: Sequence[int]) -> Callable[[], None]:
        """What puts these lanes behind what the caller has enqueued by now."""
        return follow([self._lanes[number] for number in numbers])

    def hold(self, sent: torch.Tensor) -> None:
        """The memory of ``sent`` is read until the lanes are done with it, whichever stream it belongs to."""
        self._lanes[DOWN].hold(sent)

    def _program(self, kind: str, cuts: Sequence[int]) -> Program:
        key = (kind, tuple(cuts))
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = self._make(*key)
        return found

    def _make(self, kind: str, cuts: Sequence[int]) -> Program:
        make = host_program.gather if kind == "gather" else host_program.exchange
        return make(self.layout, self.rank, self._at, cuts)

    def steps(self, pieces: int) -> list[tuple[int, int]]:
        """Of an exchange; see :class:`~megatron_flux.comm.transport.Exchange`."""
        return transport.steps(self.rank, self.tp, pieces)

    def ended(self, call: HostGather | HostExchange) -> None:
        """What ``call`` has kept may go; nothing behind the gate runs if a wait was given up."""
        if self._last is call:
            self._last = None
        if self.device.type == "cuda":
            from megatron_flux.kernels import gate

            gate.launch(self.alarm.words, self._gates, self.device)


class _HostCall:
    """A call that has begun: what both kinds do at their end."""

    def __init__(self, link: HostLink, program: Program, theirs: torch.Tensor, sent: int) -> None:
        """Nothing is enqueued yet. ``sent``: address of what is sent."""
        self._link, self._theirs = link, theirs
        pitch, first = theirs.shape[1], theirs.data_ptr()
        self._rows = [*(first + row * pitch for row in range(theirs.shape[0])), sent]
        self._parts = iter(program.parts)
        self._end: Callable[[], None] | None = None
        self._finished = False

    def _enqueue_rest(self) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        """What was sent, behind the end."""

    def enqueue(self) -> None:
        """See the protocol."""
        self._enqueue_rest()
        if self._end is None:
            self._end = self._link.behind(LANES)

    def wait(self) -> None:
        """See the protocol."""
        self.enqueue()
        if self._finished or self._end is None:
            return
        self._finished = True
        self._end()
        self._release()
        self._link.ended(self)


class HostGather(_HostCall):
    """See :class:`~megatron_flux.comm.transport.Gather`."""

    def __init__(self, link: HostLink, program: Program, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Nothing is enqueued yet."""
        super().__init__(link, program, theirs, mine.data_ptr())
        self._mine = mine
        self._begun = torch.cuda.current_stream(mine.device) if mine.is_cuda else None

    def begin(self) -> None:
        """Enqueue what can leave before anything is waited for."""
        for part in self._parts:
            self._link.run(part.steps, self._rows)
            return

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """See the protocol."""
        link = self._link
        for part in self._parts:
            link.run(part.steps, self._rows)
            if part.arrived:
                link.behind((UP,))()
                yield from part.arrived
        self.wait()

    def _enqueue_rest(self) -> None:
        for part in self._parts:
            self._link.run(part.steps, self._rows)

    def _release(self) -> None:
        if self._begun is not None and torch.cuda.current_stream() != self._begun:
            self._link.hold(self._mine)


class HostExchange(_HostCall):
    """See :class:`~megatron_flux.comm.transport.Exchange`."""

    def __init__(self, link: HostLink, program: Program, theirs: torch.Tensor, cuts: Sequence[int]) -> None:
        """Nothing is enqueued yet."""
        super().__init__(link, program, theirs, 0)
        self.steps = link.steps(len(cuts) - 1)
        self._sent: list[torch.Tensor] = []
        self._held: tuple[int, Callable[[], None]] | None = None

    def send(self, block: torch.Tensor) -> None:
        """See the protocol. A step is enqueued when the next one's block is there: the GEMM of that comes first in a
        queue that they share.
        """
        behind = self._link.follow((DOWN,))
        self._enqueue_rest()
        self._sent.append(block)
        self._held = block.data_ptr(), behind

    def _enqueue_rest(self) -> None:
        if self._held is None:
            return
        (self._rows[-1], behind), self._held = self._held, None
        behind()
        self._link.run(next(self._parts).steps, self._rows)

    def _release(self) -> None:
        self._sent.clear()
