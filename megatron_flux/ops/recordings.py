"""Work over a link through host memory, recorded as CUDA graphs and replayed where the same memory comes again.

A chunked call is 30 to 60 calls of the driver and several GEMMs: 0.5 to 0.8 ms of the host (results/host-link-x2), so
small layers were bound by it. One launch of a graph with all of that takes it 0.1 to 0.2 ms. A training of fixed
shapes gets the same addresses from torch's allocator in every step. Where it does not, calls run as they are.

Contract
    * A recording holds addresses: of operands, results and buffers, all of which its :class:`Work` allocates before it
      begins. It is replayed for work on exactly these, on the stream that it is for.
    * Work on new addresses runs as it is; the second time it is recorded, and replayed. At most one in
      :data:`SPACING` calls of a plan is recorded, so that no step is held up by many.
    * What ranks send each other is the same either way, so each rank decides for itself.

Hazards
    * **Order on the link.** The lanes of a call that runs as it is are streams, those of a recording branches of its
      graph, and slots are used in the order of calls: so a replay waits for an external event behind earlier calls
      (:meth:`~comm.host_link.HostLink.replay`), and a call that is not replayed puts the lanes behind the latest one.
    * **Memory of a recording's own.** cuBLAS's workspaces and temporaries come from a pool of the stream that it was
      recorded on. So recordings that may run at the same time have streams, and pools, of their own.
    * **One hardware queue.** CUDA chooses the order of a graph's branches; see :mod:`~megatron_flux.comm.host_link`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.group_state import Cache, state_of
from megatron_flux.comm.host_link import HostLink
from megatron_flux.comm.lanes import CALLER
from megatron_flux.comm.timeouts import poison_on_error
from megatron_flux.errors import one_line
from megatron_flux.ops.call import OperatorCall, matrix

logger = logging.getLogger("megatron_flux")

REPLAY_MS = 0.14
"""What a replay takes the host (2 x H100)."""
MOST = 512
"""Recordings of a plan: calls of that kind in a step, of all layers and micro-batches."""
SPACING = 4
WASTE = 64
"""Recordings of a plan that may be made before most of them have to have been replayed."""


class Work:
    """One call: all memory whose addresses its launches hold, and these launches."""

    def __init__(self, call: OperatorCall, link: HostLink) -> None:
        """Allocate all that the call needs. Nothing has begun: peers would wait for a call that ends in between."""
        pair = call.fp8
        self.call, self.link, self.state = call, link, state_of(call.group)
        self.x = matrix(call.x) if pair is None else pair.x.data
        scales = () if pair is None else (pair.x.scale_inv, pair.weight.scale_inv)
        given = (self.x, call.weight, call.bias, call.addend, *scales)
        self.memory: list[torch.Tensor] = [one for one in given if one is not None]

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate memory of the call."""
        self.memory.append(made := self.x.new_empty(shape, dtype=dtype))
        return made

    def begin(self) -> None:
        """Launch on the current stream what waits for no end of a transfer that may run beside later work."""
        raise NotImplementedError

    def finish(self) -> None:
        """Launch the rest: the current stream is behind the whole call then."""

    def count(self) -> None:
        """Note in the group's table that the call begins. Raises OperatorError: a neighbour's is another one."""
        if self.state.table is not None:
            self.state.table.enter()


AnyWork = TypeVar("AnyWork", bound=Work)


class Recording(NamedTuple):
    """A call as a CUDA graph."""

    graph: torch.cuda.CUDAGraph
    begun: torch.cuda.Event
    """Each replay records it where :meth:`Work.begin` has ended."""


class Recordings:
    """The recordings of a plan."""

    def __init__(self) -> None:
        self._made: Cache[tuple[object, ...], Recording] = Cache(MOST)
        self._seen: Cache[tuple[object, ...], None] = Cache(MOST)
        self.replayed = 0
        self.number = 0
        self._since = 0
        self._failed = False

    def find(self, work: Work, beside: str) -> Recording | None:
        """Return what to replay in place of ``work``, which the second call records (``beside`` a stream), or None."""
        link = work.link
        link.check()
        if not link.captures:
            return None
        self._since += 1
        key = (link.number, link.lanes.current(), *[one.data_ptr() for one in work.memory])
        recording = self._made.get(key)
        if recording is not None:
            self.replayed += 1
            return recording
        if key not in self._seen:
            self._seen[key] = None
            return None
        wasteful = self.number >= WASTE and self.replayed < 2 * self.number
        if self._failed or wasteful or self._since < SPACING or torch.cuda.is_current_stream_capturing():
            return None
        self._since, self.number = 0, self.number + 1
        try:
            recording = self._made[key] = _record(work, beside)
        except Exception as error:
            self._failed = True
            logger.warning(
                "megatron_flux: %s over %s cannot be recorded, so each call takes more time of the host (%s)",
                work.call.operator, link.through, one_line(error),
            )  # fmt: skip
        return recording


def run(work: AnyWork, recordings: Recordings | None) -> AnyWork:
    """Launch ``work`` on the current stream, to its end, and return it."""
    link = work.link
    if recordings is not None:
        _gpu_is_close(link)
    with poison_on_error(link, work.call.operator):
        work.count()
        recording = None if recordings is None else recordings.find(work, "")
        if recording is None:
            work.begin()
            work.finish()
        else:
            link.replay(recording.graph, link.lanes.current())
    return work


def start(work: Work, recordings: Recordings | None) -> Callable[[], None]:
    """Launch ``work``, the current stream behind what it begins with. Return what puts the then current stream behind
    its end, once.

    Work that multiplies is replayed only where the GPU is close behind the host: the order in which a graph's branches
    run may cost it a part of what it hides (results/host-link-x2).
    """
    link, operator, end = work.link, work.call.operator, None
    lanes, begun = link.lanes, link.lanes.current()
    if recordings is not None and not _gpu_is_close(link) and work.call.weight is not None:
        recordings = None
    with poison_on_error(link, operator):
        work.count()
        recording = None if recordings is None else recordings.find(work, operator)
        if recording is None:
            work.begin()
        else:
            side = link.side(operator)
            driver.record(side.event, begun)
            driver.wait(side.handle, side.event)
            with torch.cuda.stream(side.stream):
                link.replay(recording.graph, side.handle)
            end = lanes.mark_of(side.handle)
            driver.wait(begun, recording.begun.cuda_event)

    def wait() -> None:
        with poison_on_error(link, operator):
            if end is None:
                work.finish()
            else:
                lanes.behind(end, CALLER)
        if lanes.current() != begun:  # the stream that this memory was allocated on does not wait
            for one in work.memory:
                one.record_stream(torch.cuda.current_stream(one.device))

    return wait


def _gpu_is_close(link: HostLink) -> bool:
    """Return True if the GPU has come to the call before this one, and mark where this one begins."""
    if not link.captures or torch.cuda.is_current_stream_capturing():
        return False
    close = link.before is None or link.before.query()
    link.before = link.before or torch.cuda.Event()
    link.before.record()
    return close


def _record(work: Work, beside: str) -> Recording:
    side = work.link.side(beside)
    recording = Recording(torch.cuda.CUDAGraph(), torch.cuda.Event(external=True))
    with torch.cuda.stream(side.stream), work.link.recorded():
        recording.begun.record()  # it has no handle before
        try:
            recording.graph.capture_begin(side.pool, capture_error_mode="thread_local")  # of this thread alone
            work.begin()
            recording.begun.record()
            work.finish()
            recording.graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                recording.graph.capture_end()
            # torch may have left its generator as in a capture, where random numbers raise.
            generator = torch.cuda.default_generators[work.x.get_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
    return recording
