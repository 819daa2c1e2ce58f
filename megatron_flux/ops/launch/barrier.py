"""Beginning a call on a slab; captured calls together, where they must (:mod:`megatron_flux.comm.slab`)."""

from __future__ import annotations

from megatron_flux.comm.slab import Slab, Turn
from megatron_flux.kernels.barrier import enter_kernel
from megatron_flux.ops.cuda_graphs import capture_id
from megatron_flux.ops.fast_path import kernel_launch as relaunch


def begin(work: Slab) -> Turn:
    """The call's turn. Where it must be entered, the kernel that does so is in the current stream.

    Raises:
        OperatorError: an earlier call on this slab timed out.
    """
    if not work.captured:
        return work.begin()
    turn = work.begin_captured(capture_of(work))
    if turn.enter:
        _enter(work)
    return turn


def capture_of(work: Slab) -> int | None:
    """The capture that a call on ``work`` would be part of now, None if it would run."""
    return capture_id(work.data_table)


def _enter(work: Slab) -> None:
    tp, cuda = work.group.size(), work.data_table.is_cuda
    arguments = (
        work.flag_table, work.flags[work.rank], work.epochs, work.alarm.words, work.alarm.limit, work.rank,
    )  # fmt: skip

    def launch() -> relaunch.Launch:
        constants = {"TP": tp, "CPU": not cuda, "THREADS": 32}
        return relaunch.by_triton(enter_kernel, 1, *arguments, **constants, num_warps=1), arguments

    if cuda:
        relaunch.first_or_again(work.views, ("enter", tp), 1, launch, work.data_table.device.index)
    else:
        launch()
