"""Gathering by copy engine: every rank writes its shard into the peers' slabs, and a flag behind it.

It takes no SM from the GEMM it hides behind, and copies must be enqueued before that GEMM: with one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``) what is enqueued later starts later.

In a CUDA graph the copies are a branch that joins behind the GEMM, or where the gather is waited for, which must be in
the same capture: elsewhere waiting is refused, for what was captured has not begun, and what has begun would be waited
for at every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.copies import Copy, enqueue, order
from megatron_flux.comm.graph_capture import begin, capture_of, waited_elsewhere
from megatron_flux.comm.pending import Pending
from megatron_flux.comm.slab import ENTER_WORDS, FLAG_WORDS, CopyStream, Slab, Turn, unbroken
from megatron_flux.kernels import launch as relaunch
from megatron_flux.kernels.gather import gather_wait_kernel
from megatron_flux.ops.kernel_config import WHOLE, Edges, cdiv

TOKENS = 32  # of a half's ENTER_WORDS: steps of a paced push, written by the rank whose turn was before


def all_gather(x: torch.Tensor, work: Slab) -> Pending:
    """Gather x ``[mp, k]`` by copy engine; ``wait()`` makes the current stream wait for the peers' shards.

    One gather is open at a time: starting another waits for it first.

    Raises:
        UserError: from ``wait()`` too, when a gather is waited for in another capture than it was begun in.
    """
    _finish_open(work)
    mp, k = x.shape
    tp, rank, cuda = work.tp, work.rank, x.is_cuda
    with unbroken(work, "all_gather"):
        turn = begin(work)
        capture = work.capture
        buffers = buffers_of(work, turn.half, mp * tp, k, x.dtype)
        flag_off = turn.half * FLAG_WORDS + ENTER_WORDS
        finish = copy_engine_push(x, work, turn, buffers, flag_off, mp)
        buffers[rank][rank * mp : (rank + 1) * mp].copy_(x)
        begun = torch.cuda.current_stream() if cuda else None

        arguments = (
            work.flags[rank],
            work.ctrl,
            work.epochs,
            work.alarm.words,
            work.alarm.limit,
            turn.half,
            turn.next_half,
            flag_off,
            rank,
        )
        constants = {"TP": tp, "CPU": not cuda, "THREADS": 32}

        def launch() -> relaunch.Launch:
            return relaunch.by_triton(gather_wait_kernel, 1, *arguments, **constants, num_warps=1), arguments

        def wait() -> None:
            if capture_of(work) != capture:
                raise waited_elsewhere(capture)
            with unbroken(work, "all_gather"):
                if cuda:
                    # First the order of the streams: the kernel reads the number that the call before leaves.
                    work.end()
                    relaunch.first_or_again(work.kernels, ("wait", turn.half, tp), 1, launch, x.device.index)
                    finish()
                    if torch.cuda.current_stream() != begun:
                        # The stream whose memory x may be does not wait for the copies.
                        x.record_stream(work.side.stream)
                else:
                    launch()
                    work.end()
                if work.open_gather is pending:
                    work.open_gather = None

        pending = Pending(buffers[rank], wait, keep=(x,))
        work.open_gather = pending
    return pending


def _finish_open(work: Slab) -> None:
    """Wait for the gather that is open on ``work``, if there is one.

    One that was begun in another capture is forgotten: that capture failed, and nothing of it has run or will.
    """
    unfinished = work.open_gather
    if unfinished is None:
        return
    if work.capture is None or work.capture == capture_of(work):
        unfinished.wait()
    else:
        work.open_gather = None


def copy_engine_push(
    x: torch.Tensor,
    work: Slab,
    turn: Turn,
    buffers: list[torch.Tensor],
    flag_off: int,
    block: int,
    pace: bool = False,
    edges: Edges = WHOLE,
) -> Callable[[], None]:
    """Enqueue the shard's blocks to all peers, in reverse ring order so that a receiver has one writer at a time.

    Behind each block travels the epoch. With ``pace`` (whole shards only) the order is enforced: rank r begins step d
    when rank r-1, which wrote to the same receiver in step d-1, says that it has finished. Without it ranks drift,
    several write to one receiver and the copy engines slow down. With ``edges`` (whole shards only) the shards
    that a receiver gets first and last come in two pieces, see :func:`megatron_flux.comm.copies.order`. Captured
    calls are not paced: the number that a stream waits for cannot change between replays. Returns what makes the
    current stream wait for the copies.
    """
    mp, k = x.shape
    tp, rank = work.tp, work.rank
    blocks = cdiv(mp, block)
    pace = pace and x.is_cuda and blocks == 1 and tp > 2 and not work.captured
    base = turn.half * FLAG_WORDS + TOKENS

    def views() -> list[tuple[torch.Tensor, tuple[slice, slice], torch.Tensor, torch.Tensor, torch.Tensor]]:
        found = []
        for j in range(blocks):
            for step, piece, columns in order(tp, k, edges):
                peer, follower = (rank - step) % tp, (rank + 1) % tp
                rows = slice(j * block, min((j + 1) * block, mp))
                target = buffers[peer][rank * mp + rows.start : rank * mp + rows.stop, columns]
                word = flag_off + (rank * blocks + j) * edges.flags + piece
                mine = work.flags[rank][base + step : base + step + 1]
                theirs = work.flags[follower][base + step + 1 : base + step + 2]
                found.append((target, (rows, columns), work.flags[peer][word : word + 1], mine, theirs))
        return found

    epoch = work.epochs[turn.half : turn.half + 1]
    moves = view(work.moves, (turn.half, mp, k, x.dtype, block, edges), views)

    def push(side: torch.cuda.Stream | None) -> None:
        for i, (target, part, flag, mine, theirs) in enumerate(moves):
            if pace and side is not None and i > 0:
                driver.hold(side.cuda_stream, mine.data_ptr(), work.calls)
            target.copy_(x[part])
            flag.copy_(epoch)
            if pace and i < len(moves) - 1:
                theirs.copy_(epoch)

    if not x.is_cuda:
        push(None)
        return lambda: None
    if work.side is None:
        work.side = CopyStream(torch.cuda.Stream(x.device, priority=-1), torch.cuda.Event(), torch.cuda.Event())
    side, before, after = work.side
    before.record()
    side.wait_event(before)
    if not pace:
        key = (turn.half, mp, k, x.dtype, block, edges)
        enqueue(view(work.copies, key, lambda: _copies(moves, x)), x.data_ptr(), epoch.data_ptr(), side.cuda_stream)
    else:
        with torch.cuda.stream(side):
            push(side)
    after.record(side)
    return after.wait


def _copies(moves: list[tuple[Any, ...]], x: torch.Tensor) -> list[Copy]:
    size = x.element_size()
    pitch = x.shape[1] * size
    return [
        Copy(
            target.data_ptr(),
            rows.start * pitch + columns.start * size,
            (columns.stop - columns.start) * size,
            rows.stop - rows.start,
            pitch,
            flag.data_ptr(),
        )
        for target, (rows, columns), flag, _, _ in moves
    ]


def buffers_of(work: Slab, half: int, m: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The gather buffer ``[m, k]`` of every rank."""

    def make() -> list[torch.Tensor]:
        return [work.half(half, r).view(dtype)[: m * k].view(m, k) for r in range(work.tp)]

    return view(work.buffers, (half, m, k, dtype), make)


def view(known: dict[tuple[Any, ...], Any], key: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` returns, kept in ``known`` (of a slab) under ``key``."""
    found = known.get(key)
    if found is None:
        found = known[key] = make()
    return found
