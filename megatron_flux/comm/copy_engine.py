"""Gathering by copy engine: every rank writes its shard into the peers' slabs, and a flag behind it.

Contract
    :func:`push` enqueues the copies of a shard ``[mp, k]`` to all peers, in reverse ring order so that a receiver has
    one writer at a time: step ``d`` of rank ``r`` goes to rank ``r - d``. Behind each copy travels the epoch of the
    call (:mod:`megatron_flux.comm.slab`), into the receiver's flags ``[tp]``, or ``[tp, 2]`` where shards come in two
    pieces of columns (:class:`Edges`), of which rank ``r`` sets row ``r``. What it takes is a list of addresses, which
    depends on nothing but shapes: a call that is made again enqueues the same list for another x.
    On CPUs the processor copies at once.

Hazards
    * Copies take no SM from the GEMM that they hide behind, but must be enqueued before it: with one hardware queue
      (``CUDA_DEVICE_MAX_CONNECTIONS=1``) what is enqueued later starts later.
    * A copy within the GPU runs on SMs, in that queue, and the next GEMM of whatever stream begins when it ends
      (results/fp8-own-rows). The own shard, put behind the copies to peers, held the caller's next GEMM back until they
      had ended: 0.23 ms instead of 0.06 (2 x H100, results/fp8-scatter). It stays with the caller, who may do without.
    * In a CUDA graph the copies are a branch that joins behind the GEMM, or where the gather is waited for, which must
      be in the same capture: elsewhere waiting is refused, for what was captured has not begun, and what has begun
      would be waited for at every replay.
    * One stream for all copies: on two, four or seven at once they are half as fast.

Measured (4 x H200): holding each step until the rank whose turn was before had finished was within 3 % of doing nothing
(results/ops-h200x4-nvlink-triton). Each piece costs 6 us of the copy engine's time beside its bytes (2 x H200,
results/stand-in-8-h200x2), so shards are cut only where it is worth that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.slab import ENTER_WORDS, FLAG_WORDS, CopyStream, Slab, kept, unbroken, waited_elsewhere


class Edges(NamedTuple):
    """Shards that are sent in two pieces of columns, each with its flag.

    Tiles of a GEMM's first round belong to the first two shards to come and begin at the same time: with ``early`` the
    first columns of both go ahead. What is left to multiply when the last copy has arrived cannot be hidden: with
    ``late`` that is only the last columns of the last shard to come.
    """

    early: bool = False
    late: bool = False
    columns: int = 0  # of the smaller piece and, in whole numbers, of the other; the last of them may be cut short by k

    @property
    def flags(self) -> int:
        """Flags of a shard."""
        return 2 if self.early or self.late else 1


WHOLE = Edges()


class Copy(NamedTuple):
    """A block of x for a peer, in bytes: ``rows`` of ``width`` that begin ``pitch`` apart on both sides."""

    target: int
    offset: int  # in x
    width: int
    rows: int
    pitch: int
    flag: int  # the peer's word that says it has arrived
    scales: int = 0  # where the shard's scales go before; 0: they do not


class Push(NamedTuple):
    """The copies of a shard to all peers, and the address of the epoch that follows each."""

    copies: list[Copy]
    epoch: int
    scale_bytes: int = 0  # of a shard in FP8 that has scales in blocks

    def enqueue(self, source: int, stream: int, scales: int = 0) -> None:
        """Put the copies of x, which lies at ``source``, into ``stream`` (a handle); its scales lie at ``scales``."""
        for target, offset, width, rows, pitch, flag, scales_to in self.copies:
            if scales_to:
                driver.copy(scales_to, scales, self.scale_bytes, stream)
            if width == pitch:
                driver.copy(target, source + offset, width * rows, stream)
            else:
                driver.copy_rows(target, source + offset, width, rows, pitch, stream)
            driver.copy(flag, self.epoch, 4, stream)

    def by_processor(self, source: int, scales: int = 0) -> None:
        """Copy now, in the same order."""
        for target, offset, width, rows, pitch, flag, scales_to in self.copies:
            if scales_to:
                ctypes.memmove(scales_to, scales, self.scale_bytes)
            for row in range(rows):
                ctypes.memmove(target + row * pitch, source + offset + row * pitch, width)
            ctypes.memmove(flag, self.epoch, 4)


def order(tp: int, k: int, edges: Edges) -> list[tuple[int, int, slice]]:
    """What a rank sends in which order: ``(step, piece, columns)``; step ``d`` goes to rank ``r - d``."""
    small = edges.columns
    last = (k - 1) // small * small if small else 0
    pieces = [(slice(0, k),)] * tp
    if edges.early:
        pieces[1:3] = [(slice(0, small), slice(small, k))] * len(pieces[1:3])
    if edges.late and (tp > 3 or not edges.early):
        pieces[tp - 1] = (slice(0, last), slice(last, k))
    first = range(1, min(3, tp))
    turns = [(step, piece) for piece in range(2) for step in first if piece < len(pieces[step])]
    turns += [(step, piece) for step in range(3, tp) for piece in range(len(pieces[step]))]
    return [(step, piece, pieces[step][piece]) for step, piece in turns]


def push_of(
    work: Slab, half: int, mp: int, k: int, dtype: torch.dtype, edges: Edges, scales: torch.Size | None = None
) -> Push:
    """What :func:`push` enqueues for shards ``[mp, k]`` of ``dtype`` in ``half`` of the slab; ``scales``: the shape of
    a shard's fp32 scales, which travel with its first piece.
    """

    def make() -> Push:
        rank, tp, size = work.rank, work.tp, dtype.itemsize
        pitch, copies, places = k * size, [], None
        if scales is not None:
            places = work.scale_buffers(half, tp * mp * pitch, scales)
        for step, piece, columns in order(tp, k, edges):
            peer = (rank - step) % tp
            word = half * FLAG_WORDS + ENTER_WORDS + rank * edges.flags + piece
            offset, width = columns.start * size, (columns.stop - columns.start) * size
            target = work.data[peer].data_ptr() + half * work.half_bytes + rank * mp * pitch + offset
            flag = work.flags[peer].data_ptr() + 4 * word
            scales_to = 0 if places is None or piece else places[peer][rank].data_ptr()
            copies.append(Copy(target, offset, width, mp, pitch, flag, scales_to))
        return Push(copies, work.epochs.data_ptr() + 4 * half, 0 if scales is None else 4 * scales.numel())

    return kept(work.pushes, (half, mp, k, dtype, edges, scales), make)


def push(
    x: torch.Tensor, work: Slab, half: int, edges: Edges = WHOLE, scales: torch.Tensor | None = None
) -> Callable[[], None]:
    """Enqueue the copies of shard x ``[mp, k]``, and of its ``scales``, behind the current stream; returns what makes
    it wait for them.
    """
    found = push_of(work, half, *x.shape, x.dtype, edges, None if scales is None else scales.shape)
    addresses = x.data_ptr(), 0 if scales is None else scales.data_ptr()
    if not x.is_cuda:
        found.by_processor(*addresses)
        return lambda: None
    if work.side is None:
        work.side = CopyStream(torch.cuda.Stream(x.device, priority=-1), torch.cuda.Event(), torch.cuda.Event())
    side, before, after = work.side
    before.record()
    side.wait_event(before)
    found.enqueue(addresses[0], side.cuda_stream, addresses[1])
    after.record(side)
    return after.wait


def all_gather(x: torch.Tensor, work: Slab, *, own_rows: bool = True) -> Pending:
    """Gather x ``[mp, k]`` by copy engine; ``wait()`` makes the current stream wait for the peers' shards. Without
    ``own_rows`` the rank's own are left out: the caller reads x, on the stream that waits. One gather is open at once:
    starting another waits for it first. Raises UserError: from ``wait()`` too, when a gather is waited for in another
    capture than it was begun in.
    """
    from megatron_flux.kernels import launch as kernel_launch
    from megatron_flux.kernels.device import gather_wait_kernel

    _finish_open(work)
    (mp, k), tp, rank, cuda = x.shape, work.tp, work.rank, x.is_cuda
    with unbroken(work, "all_gather"):
        turn = work.begin()
        capture = work.capture
        gathered = work.gather_buffers(turn.half, mp * tp, k, x.dtype)[rank]
        finish = push(x, work, turn.half)
        if own_rows:
            gathered[rank * mp : (rank + 1) * mp].copy_(x)
        begun = torch.cuda.current_stream() if cuda else None
        arguments = (work.flags[rank], *work.arguments(turn), rank)

        def wait() -> None:
            if work.current_capture() != capture:
                raise waited_elsewhere(capture)
            with unbroken(work, "all_gather"):
                if cuda:  # first the order of the streams: the kernel reads the number that the call before leaves
                    work.end()
                kernel_launch.wait_for_peers(
                    gather_wait_kernel, work.kernels, ("wait", turn.half, tp), x.device, tp, arguments
                )
                if not cuda:
                    work.end()
                finish()
                if cuda and torch.cuda.current_stream() != begun:
                    # The stream whose memory x may be does not wait for the copies, nor for who reads x in their place.
                    x.record_stream(work.side.stream)
                    if not own_rows:
                        x.record_stream(torch.cuda.current_stream())
                if work.open_gather is pending:
                    work.open_gather = None

        pending = Pending(gathered, wait, keep=(x,), own_rows=own_rows)
        work.open_gather = pending
    return pending


def _finish_open(work: Slab) -> None:
    """Wait for the gather that is open on ``work``, if there is one. One that was begun in another capture is
    forgotten: that capture failed, and nothing of it has run or will.
    """
    unfinished = work.open_gather
    if unfinished is None:
        return
    work.check()  # before it: a wait on a slab that is of no use any more could end in a time-out instead of the cause
    if work.capture is None or work.capture == work.current_capture():
        unfinished.wait()
    else:
        work.open_gather = None
