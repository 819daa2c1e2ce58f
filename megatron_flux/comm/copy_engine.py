"""Gather by copy engine: every rank writes its shard into the peers' slabs, and a flag behind it.

Contract
    :class:`Push` copies a shard ``[mp, k]`` to all peers, in reverse ring order so that a receiver has one writer at a
    time: step ``d`` of rank ``r`` goes to rank ``r - d``. Behind each copy travels the epoch of the call
    (:mod:`megatron_flux.comm.slab`), into the receiver's flags ``[tp]``, or ``[tp, 2]`` where shards come in two pieces
    of columns (:class:`Edges`); rank ``r`` sets row ``r``. On CPUs the processor copies at once.

Hazards
    * Copies take no SM from the GEMM that they hide behind, but must be enqueued before it: with one hardware queue
      (``CUDA_DEVICE_MAX_CONNECTIONS=1``) what is enqueued later starts later.
    * A copy within the GPU runs on SMs, and the next GEMM of any stream begins when it ends (results/fp8-own-rows).
      Behind the copies to peers, the local shard held that GEMM back until they had ended: 0.23 ms instead of 0.06
      (2 x H100, results/fp8-scatter). So the caller puts it into its place.
    * In a CUDA graph the copies are a branch that joins behind the GEMM, or where the gather is waited for, which must
      be in the same capture: elsewhere waiting is refused, for what was captured has not begun, and what has begun
      would be waited for at every replay.
    * One stream for all copies of a group: on two, four or seven at once they are half as fast, and what a GEMM waits
      for must not share the link with what is needed later.

Measured: holding each step until the rank before had finished was within 3 % of doing nothing (4 x H200,
results/ops-h200x4-nvlink-triton). Each piece costs 6 us of the copy engine's time beside its bytes (2 x H200,
results/stand-in-8-h200x2), so shards are cut only where it is worth that.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.slab import DATA_WORDS, FLAG_WORDS, Side, Slab


class Edges(NamedTuple):
    """Shards that are sent in two pieces of columns, each with its flag.

    Tiles of a GEMM's first round belong to the first two shards to come and begin at the same time: with ``early`` the
    first columns of both go ahead. What is left to multiply when the last copy has arrived cannot be hidden: with
    ``late`` that is only the last columns of the last shard to come.
    """

    early: bool = False
    late: bool = False
    columns: int = 0  # of the smaller piece and, in whole numbers, of the other; the last of them may be cut short by k


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

    def send(self, side: Side | None, source: int, scales: int = 0) -> None:
        """Enqueue the copies of x at address ``source``, and its scales at ``scales``, behind ``side.before``, which
        the caller has recorded, and ``side.after`` behind them. ``side``: None where the processor copies, now.
        """
        if side is None:
            for target, offset, width, rows, pitch, flag, scales_to in self.copies:
                if scales_to:
                    ctypes.memmove(scales_to, scales, self.scale_bytes)
                for row in range(rows):
                    ctypes.memmove(target + row * pitch, source + offset + row * pitch, width)
                ctypes.memmove(flag, self.epoch, 4)
            return
        stream = side.stream
        driver.wait(stream, side.before)
        for target, offset, width, rows, pitch, flag, scales_to in self.copies:
            if scales_to:
                driver.copy(scales_to, scales, self.scale_bytes, stream)
            if width == pitch:
                driver.copy(target, source + offset, width * rows, stream)
            else:
                driver.copy_rows(target, source + offset, width, rows, pitch, stream)
            driver.copy(flag, self.epoch, 4, stream)
        driver.record(side.after, stream)


@functools.lru_cache(1024)
def order(tp: int, k: int, edges: Edges) -> list[tuple[int, int, slice]]:
    """Return the send schedule as ``(step, piece, columns)``. In step ``d`` rank ``r`` sends to ``r - d``."""
    small = edges.columns
    last = (k - 1) // small * small if small else 0
    pieces: list[tuple[slice, ...]] = [(slice(0, k),)] * tp
    if edges.early:
        pieces[1:3] = [(slice(0, small), slice(small, k))] * len(pieces[1:3])
    if edges.late and (tp > 3 or not edges.early):
        pieces[tp - 1] = (slice(0, last), slice(last, k))
    sends = []
    for steps in (range(1, min(3, tp)), *zip(range(3, tp))):  # of the first two shards first pieces go ahead
        for piece in range(2):
            for step in steps:
                if piece < len(pieces[step]):
                    sends.append((step, piece, pieces[step][piece]))
    return sends


def push_of(
    work: Slab, half: int, mp: int, k: int, dtype: torch.dtype, edges: Edges, scales: torch.Size | None = None
) -> Push:
    """Build the copies of shards ``[mp, k]`` into a half; ``scales``: the shape of a shard's, which go first."""
    rank, tp, size, flags = work.rank, work.tp, dtype.itemsize, 1 if edges == WHOLE else 2
    pitch, epoch, copies = k * size, work.epochs.data_ptr() + 4 * half, []
    places = None if scales is None else work.scale_buffers(half, tp * mp * pitch, scales)
    begin, word = half * work.half_bytes + rank * mp * pitch, half * FLAG_WORDS + DATA_WORDS + rank * flags
    for step, piece, columns in order(tp, k, edges):
        peer, offset = (rank - step) % tp, columns.start * size
        copies.append(Copy(
            work.data[peer].data_ptr() + begin + offset, offset, (columns.stop - columns.start) * size, mp, pitch,
            work.flags[peer].data_ptr() + 4 * (word + piece),
            0 if places is None or piece else places[peer][rank].data_ptr(),
        ))  # fmt: skip
    return Push(copies, epoch, 0 if scales is None else 4 * scales.numel())


def push_in_place(work: Slab, half: int, mp: int, k: int) -> Push:
    """Build the copies of a transposed shard ``[k, mp]`` of bytes. It lies in its columns of ``[k, tp * mp]`` in a half
    of the slab here, and goes to the same columns there.
    """
    rank, tp = work.rank, work.tp
    word, copies = half * FLAG_WORDS + DATA_WORDS + rank, []
    for step in range(1, tp):
        peer = (rank - step) % tp
        target = work.data[peer].data_ptr() + half * work.half_bytes + rank * mp
        copies.append(Copy(target, 0, mp, k, tp * mp, work.flags[peer].data_ptr() + 4 * word))
    return Push(copies, work.epochs.data_ptr() + 4 * half)


def side_of(work: Slab) -> Side:
    """Return the stream of the copies of ``work``, on a GPU."""
    if work.side is None:
        stream = work.streams.get(work.captured)
        if stream is None:
            stream = work.streams[work.captured] = torch.cuda.Stream(work.data_table.device, priority=-1)
        events = before, after = torch.cuda.Event(), torch.cuda.Event()
        for event in events:
            event.record(stream)  # it has no handle before
        work.side = Side(stream.cuda_stream, before.cuda_event, after.cuda_event, stream, events)
    return work.side


def finish_open(work: Slab) -> None:
    """Wait for the gather that is open on ``work``. One that was begun in another capture is forgotten: that capture
    failed, and nothing of it has run or will.
    """
    work.check()  # first: a wait on a poisoned slab could end in a time-out instead of the cause
    if work.capture is None or work.capture == work.current_capture():
        work.open_gather.wait()  # type: ignore[union-attr]
    else:
        work.open_gather = None
