"""Symmetric memory: one slab per process group and purpose, with flags, epochs and a double buffer.

A slab is one allocation on every rank of a group, mapped by all of them: ``[flags][half 0][half 1]``. Layers share it.
A call claims a *slot*: one half; the next call gets the other. A slab is as large as the largest call so far needs.

Why no barrier is needed
    Every operator that runs on a slab (1) is enqueued on all ranks in the same order, each call after the previous one
    of that slab, (2) finishes on a rank only after it has seen data of the call from *every* peer, and (3) has its
    reads of a half enqueued before the next call. So "call i-1 is finished here" implies "every peer has begun call
    i-1", which implies "every peer has finished call i-2": a rank that begins call i may overwrite the half of call i-2
    on all peers. What a call leaves in its half (a gathered input) is valid until the next call on that slab is
    enqueued.

Epochs
    ``epochs[half]`` on the device is the number of the call that uses the half next. The last CTA of a call writes the
    next call's number into the word of the other half, so a word does not change while copies still read it. Flags are
    compared with the epoch and never reset. That is correct for 2^31 calls; after half as many the next call makes a
    new slab.

CUDA graphs
    Graphs are replayed in any order, but each of their calls has a fixed half. So captured calls run on a slab of their
    own (``captured=True``). The first one of a capture uses half 0 and is *synchronised*: a kernel before it takes the
    larger of both words of ``epochs`` as its number, tells all peers, and waits until all have said so. After that
    barrier nobody uses either half, and further calls alternate as above. A call on this slab that is not captured (a
    warm-up) is synchronised, too. Slabs cannot be made during capture: run each shape once before, inside
    :func:`megatron_flux.ops.cuda_graphs.captured_calls`. A synchronised call must not overlap another one on a rank.
    So the program must order a replay after whatever used the slab before, and leave no gather open around it.

Beside other process groups
    A kernel that waits for its peers on all SMs keeps out kernels of other groups, and a peer may be waiting for one of
    those. Two things let the kernel end, whatever else runs. :meth:`Slab.start` enqueues a kernel of one CTA before it,
    which returns once all ranks have reached the call: then no peer has to do anything else first. And the kernel
    itself needs no more than one free SM on each rank (:mod:`megatron_flux.kernels.plain`). Which groups need it:
    :func:`megatron_flux.comm.links.starts_together`.

Exceptions
    After an exception between the claim of a slot and the kernel that writes the next call's epoch, the next call would
    read stale data. So

    * what can run out of memory comes before the claim: an exception until then leaves no trace. That rank makes its
      call again, or ends. If it was the first call of its kind, ranks that no longer agree report that
      (:mod:`megatron_flux.comm.agreement`);
    * from the claim on, all that a call does is in a ``try`` that ends in :meth:`Slab.poison`: every further call on
      this rank raises an OperatorError that names the rank, the operator and the exception;
    * peers cannot be told: they wait until their own bounded wait ends, at the latest in the call after this one. No
      wait is satisfied by stale data;
    * in a CUDA graph's capture nothing has run yet and the slab stays good. If a program catches the exception inside
      the capture, replaying that graph is an error.

    The job is started again from its last checkpoint. Two things remove the poison without that, both on all ranks
    together: a call that needs a larger slab, and :meth:`megatron_flux.comm.group_state.GroupState.renew_slabs`, for
    callers that know that the same call has failed on every rank, such as the tuner.

Hazards
    * Calls on different streams are ordered: the later stream waits for all that was enqueued on the earlier one. So
      are the streams of one capture. Replays are not seen.
    * NVLink multicast is refused: a multicast pointer on the handle is an error.
    * torch's own signal pads are not used: their slots collide between groups.

Source: design of FLUX (arXiv 2406.06858) for flags; the epoch protocol is described in quack's all_gather_gemm.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver as driver
from megatron_flux.comm import shared_memory
from megatron_flux.comm.agreement import together
from megatron_flux.comm.call_table import LAST, CallTable
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.timeouts import Alarm
from megatron_flux.errors import OperatorError

if TYPE_CHECKING:
    from megatron_flux.kernels.launch import Relaunch

FLAG_WORDS = 1 << 17  # int32 flags per half: 1024 local tiles of 8 sources, 16 times over
MOST_CTAS = 256  # of a kernel, one on an SM
# The first words of a half's flags are of ranks that have begun a synchronised call. Then come
START_WORDS = 32  # those of :meth:`Slab.start`,
SUM_WORDS = 64  # those of CTAs that have summed a part of a tile (:mod:`megatron_flux.kernels.hopper.split_k`),
DATA_WORDS = SUM_WORDS + MOST_CTAS  # and those of the data of a call,
CALL_FLAGS = FLAG_WORDS - DATA_WORDS  # so many.
MOST_CALLS = 1 << 30
"""Calls on a slab that no CUDA graph holds, all ranks' alike; see :mod:`megatron_flux.kernels.device`, *Flags*."""
MIB = 1 << 20
TILE_NUMBERS = 128 * 256  # of the largest tile
SCALES_AT = 128
"""Scales of FP8 shards lie behind their gather buffer, at a multiple of so many bytes."""
HEAD = 2 * 4 * FLAG_WORDS  # bytes of both halves' flags, which come first in a slab


class Side(NamedTuple):
    """The stream of the copies and the events that order it with the caller's, as handles for the driver."""

    stream: int
    before: int
    after: int
    owner: torch.cuda.Stream
    events: tuple[torch.cuda.Event, ...] = ()


class StreamOrder:
    """Put calls on the GPU ``index`` in one order, whatever streams they are made on."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.raw = -1
        """The latest stream's handle: asking for the stream itself costs twenty times as much."""
        self._stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Put the current stream behind the latest call's, if it is another."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self.raw:
            current = torch.cuda.current_stream()
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._stream, self.raw = current, raw


@functools.cache
def kernels_on(index: int) -> StreamOrder:
    """Return the order of kernels that wait on all SMs: two at once could each keep the other's peer waiting."""
    return StreamOrder(index)


@dataclass
class Slab:
    """See the module. Tensors in ``data`` and ``flags`` are indexed by rank and alias that rank's memory."""

    tp: int  # ranks of the group
    rank: int  # of the calling process in the group
    half_bytes: int
    captured: bool
    data: list[torch.Tensor]  # uint8 ``[2 * half_bytes]`` per rank
    flags: list[torch.Tensor]  # int32 ``[2 * FLAG_WORDS]`` per rank
    data_table: torch.Tensor  # int64 ``[tp]``, addresses of ``data``, on the device
    flag_table: torch.Tensor  # int64 ``[tp]``, addresses of ``flags``, on the device
    ctrl: torch.Tensor  # int32: pieces taken to add, CTAs that have left; by share of the tiles the call that took it
    epochs: torch.Tensor  # int32 ``[2]``
    alarm: Alarm
    keep: Any = None
    kernel_order: StreamOrder | None = None  # of the GPU
    table: CallTable | None = None  # where calls are entered
    calls: int = 0  # so far; of a captured slab since the last one that was synchronised
    in_graphs: bool = False  # a call on it has been captured
    open_gather: Pending | None = None  # the all_gather that was begun here and not waited for
    side: Side | None = None
    streams: dict[bool, torch.cuda.Stream] = field(default_factory=dict)
    """Of the copies, by whether calls are captured; those of one group share them."""
    limit: int = MOST_CALLS  # calls after which a plan asks the group for a slab again; 0 once it is replaced
    kernels: dict[tuple[Any, ...], Relaunch | Literal[False]] = field(default_factory=dict)
    """Barrier kernels that have been launched on this slab; False where Triton has to launch one every time."""
    capture: int | None = None  # that the latest call was part of
    sums: torch.Tensor | None = None  # see :meth:`make_sums`

    def __post_init__(self) -> None:
        self._index = self.data_table.get_device()
        self._halves: dict[torch.dtype, Sequence[torch.Tensor]] = {}
        self._order = self._outside = StreamOrder(self._index)
        """Of calls in the same capture, or outside of any; and of those outside, during a capture."""

    def claim(self, spec: int = 0) -> tuple[int, int]:
        """Claim a slot for a call, ``spec`` in the table; return its half and the current stream's handle (CPUs: -1).

        Puts streams in order, and enqueues the barrier if the call must be synchronised. Raises OperatorError: an
        earlier call on this slab timed out or poisoned it, or a neighbour makes another call.
        """
        if self.alarm.view[0]:
            raise OperatorError(self.alarm.message())
        synchronise = self.captured and self._enter_capture()
        raw = -1 if self._index < 0 else torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._order.raw:
            self._order.follow()
        half = self.calls & 1
        self.calls += 1
        if (table := self.table) is not None:  # CallTable.enter, without the time of a call
            number = table.number = (table.number + 1) & 0xFFFFFFFF
            slot, word = number & LAST, number << 32 | spec
            table.own[slot] = word
            for row in table.beside:
                if (seen := row[slot]) != word and seen >> 32 == number:
                    raise table.different(row, spec)
        if synchronise:
            _synchronise(self)
        return half, raw

    def _enter_capture(self) -> bool:
        """Note which capture the coming call is part of; return True if it must be synchronised."""
        capture = self.current_capture()
        if capture != self.capture:  # a captured stream must not wait for one of another capture, or of none
            if self.capture is None:
                self._outside = self._order
            self._order = self._outside if capture is None else StreamOrder(self._index)
        elif capture is not None:
            return False
        self.capture, self.calls = capture, 0
        self.in_graphs |= capture is not None
        return True

    def start(self, half: int) -> None:
        """Enqueue the kernel that returns once all ranks have come to the call in ``half``. Behind a synchronised
        call's barrier it waits for nobody; but a capture must not be the first to launch it: kernels cannot be loaded
        there.
        """
        if (order := self.kernel_order) is not None and self.capture is None:
            order.follow()
        from megatron_flux.kernels.device import start_kernel

        words = half * FLAG_WORDS + START_WORDS
        _wait_for_peers(self, start_kernel, ("start", half), half, words)
        if self.kernel_order is None:  # on CPUs it has run
            self.check()

    def end(self) -> None:
        """End a call on the current stream: put it behind all that the slab's streams were given before."""
        if self.data_table.is_cuda:
            self._order.follow()
        else:
            self.check()

    def check(self) -> None:
        """Raise OperatorError if an earlier call on this slab timed out or poisoned it."""
        if self.alarm.view[0]:
            raise OperatorError(self.alarm.message())

    def poison(self, operator: str, error: BaseException) -> None:
        """Refuse every further call: ``error`` ended a call of ``operator`` that may have claimed its slot. In a
        capture the graph becomes unusable instead. The caller raises ``error`` again.
        """
        captured = self.captured and (self.capture is not None or torch.cuda.is_current_stream_capturing())
        if captured:
            _invalidate_capture(operator, error, self.data_table.device)
        else:
            self.alarm.poison(operator, error)
        if self.side is not None:
            with contextlib.suppress(Exception):
                _join(self.side.owner, captured)

    def current_capture(self) -> int | None:
        """Return the number of the capture that a call would now be part of, None if it runs now."""
        return capture_id(self.data_table)

    def arguments(self, half: int) -> tuple[object, ...]:
        """Return every kernel's arguments for its slot: ``ctrl, epochs, err, limit, slot, next_slot, flag_off``."""
        alarm = self.alarm
        return (self.ctrl, self.epochs, alarm.words, alarm.limit, half, 1 - half, half * FLAG_WORDS + DATA_WORDS)

    def make_sums(self, sms: int) -> None:
        """Allocate what CTAs sum of parts of a tile, fp32, if there is none; before a call claims its slot."""
        if self.sums is None:
            self.sums = torch.empty(sms * TILE_NUMBERS, dtype=torch.float32, device=self.data_table.device)

    def half(self, half: int, rank: int) -> torch.Tensor:
        """Return a half of ``rank``, uint8 ``[half_bytes]``."""
        return self.data[rank][half * self.half_bytes : (half + 1) * self.half_bytes]

    def gather_buffer(self, half: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's gather buffer: ``shape``, from the beginning of the half."""
        if (halves := self._halves.get(dtype)) is None:
            halves = self._halves[dtype] = self.data[self.rank].view(dtype).view(2, -1).unbind()
        strides = list(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]
        return halves[half].as_strided(shape, strides)  # half the time of a slice and a view

    def scale_buffers(self, half: int, nbytes: int, shape: Sequence[int]) -> list[torch.Tensor]:
        """Return fp32 ``[tp, *shape]`` of every rank: all shards' scales, behind a gather buffer of ``nbytes``."""
        at = -(-nbytes // SCALES_AT) * SCALES_AT
        size = 4 * self.tp * math.prod(shape)
        return [self.half(half, r)[at : at + size].view(torch.float32).view(self.tp, *shape) for r in range(self.tp)]


def scale_bytes(shape: Sequence[int]) -> int:
    """Return the most that a source's fp32 scales ``shape`` take in a half, behind a gather buffer."""
    return 4 * math.prod(shape) + SCALES_AT


def capture_id(tensor: torch.Tensor) -> int | None:
    """Return the number of the capture that a call on the device of ``tensor`` would be part of; None: it runs now."""
    if not tensor.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    return driver.capture_id(torch._C._cuda_getCurrentRawStream(tensor.get_device()))


def _synchronise(work: Slab) -> None:
    from megatron_flux.kernels.device import enter_kernel  # Triton, which slabs without captured calls do not need

    _wait_for_peers(work, enter_kernel, ("enter", 0), work.flags[work.rank].numel())


def _wait_for_peers(work: Slab, kernel: Any, key: tuple[str, int], *numbers: int) -> None:
    from megatron_flux.kernels.launch import launch

    alarm, device = work.alarm, work.data_table.device
    arguments = (work.flag_table, work.flags[work.rank], work.epochs, alarm.words, alarm.limit, work.rank, *numbers)
    launch(work.kernels, key, kernel, 1, arguments, of_one_warp(work.tp, cpu=device.type != "cuda"), {}, device)


def of_one_warp(tp: int, *, cpu: bool) -> dict[str, Any]:
    """Return the constants of kernels of one warp that wait for peers."""
    return {"TP": tp, "CPU": cpu, "THREADS": 32, "num_warps": 1}


def _join(side: torch.cuda.Stream, captured: bool) -> None:
    """Put the current stream behind the copies of x that are under way: the caller may reuse its memory only then, and
    a capture must have no branch left that does not join.
    """
    if captured:
        with torch.cuda.stream(side):
            if not torch.cuda.is_current_stream_capturing():
                return
    torch.cuda.current_stream().wait_stream(side)


def _invalidate_capture(operator: str, error: BaseException, device: torch.device) -> None:
    """Let every replay of the current capture end with an error."""
    message = f"a call of {operator} was broken off by {type(error).__name__} while this CUDA graph was captured"
    try:
        torch._assert_async(torch.zeros((), dtype=torch.bool, device=device), message)
    except Exception:
        # No memory for that: waiting for a stream that is captured ends the capture.
        with contextlib.suppress(Exception):
            torch.cuda.current_stream().synchronize()


def size_class(nbytes: int) -> int:
    """Return the size to allocate for ``nbytes``: at least 4 MiB, rounded up to an eighth of the power of two below."""
    if nbytes <= 4 * MIB:
        return 4 * MIB
    step = 1 << ((nbytes - 1).bit_length() - 4)
    return -(-nbytes // step) * step


def make(
    group: dist.ProcessGroup, half_bytes: int, device: torch.device, captured: bool, fill: int | None = None
) -> Slab:
    """Make a slab whose halves hold ``half_bytes``; collective. ``fill``: initial value of every int16 in them."""
    whole, keep = shared_memory.allocate(group, HEAD + 2 * half_bytes, device)
    flags, data = [w[:HEAD].view(torch.int32) for w in whole], [w[HEAD:] for w in whole]
    if fill is not None:
        data[group.rank()].view(torch.int16).fill_(fill)
    return assemble(group, half_bytes, flags, data, captured=captured, keep=keep)


def assemble(
    group: dist.ProcessGroup,
    half_bytes: int,
    flags: list[torch.Tensor],
    data: list[torch.Tensor],
    *,
    captured: bool,
    keep: Any,
) -> Slab:
    """Make a slab of allocated memory: ``flags`` and ``data`` of every rank, as in :class:`Slab`; collective."""
    device = data[0].device

    def table(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)

    made: list[Slab] = []

    def make_own() -> None:
        flags[group.rank()].zero_()
        ctrl, epochs = torch.zeros(2 + MOST_CTAS, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        order = None if device.type == "cpu" else kernels_on(data[0].get_device())
        slab = Slab(
            group.size(), group.rank(), half_bytes, captured, data, flags, table(data), table(flags), ctrl.to(device),
            epochs.to(device), Alarm(group, device), keep, order,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        made.append(slab)

    # Nobody writes a flag before everybody's are zero, and nobody uses a slab that a peer could not make.
    together(group, f"making a workspace of 2 x {half_bytes // MIB} MiB", make_own)
    return made[0]
