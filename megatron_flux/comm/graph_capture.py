"""How a call begins on a slab: its turn, which CUDA graph it is part of, the barrier that captured calls begin with.

Why captured calls need a barrier: :mod:`megatron_flux.comm.slab`, *CUDA graphs*.
"""

from __future__ import annotations

import torch

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.slab import ENTER_WORDS, FLAG_WORDS, Slab, Turn
from megatron_flux.errors import UserError


def capture_id(tensor: torch.Tensor) -> int | None:
    """The number of the capture that a call on the device of ``tensor`` would be part of, None if it runs now."""
    if not tensor.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    return driver.capture_id(torch._C._cuda_getCurrentRawStream(tensor.get_device()))


def capture_of(work: Slab) -> int | None:
    """As :func:`capture_id`, of a call on ``work``."""
    return capture_id(work.data_table)


def waited_elsewhere(begun: int | None) -> UserError:
    """The error of a gather begun in the capture ``begun`` (None: in none) and waited for in another."""
    return UserError(
        f"an all_gather that was begun {'outside of' if begun is None else 'inside'} a CUDA graph's capture can only "
        "be waited for there: finish it before capture begins or ends"
    )


def begin(work: Slab) -> Turn:
    """Take the call's turn; where the turn must be entered, the barrier is in the current stream.

    Raises:
        OperatorError: an earlier call on this slab timed out or was broken off.
    """
    if not work.captured:
        return work.begin()
    turn = work.begin_captured(capture_of(work))
    if turn.enter:
        _enter(work)
    return turn


def turn_arguments(work: Slab, turn: Turn) -> tuple[object, ...]:
    """What every kernel takes of its call: ``ctrl, epochs, err, limit, slot, next_slot, flag_off``."""
    alarm, flag_off = work.alarm, turn.half * FLAG_WORDS + ENTER_WORDS
    return (work.ctrl, work.epochs, alarm.words, alarm.limit, turn.half, turn.next_half, flag_off)


def _enter(work: Slab) -> None:
    from megatron_flux.kernels import launch as kernel_launch  # Triton, which slabs without captured calls do not need
    from megatron_flux.kernels.barrier import enter_kernel

    tp, cuda = work.tp, work.data_table.is_cuda
    arguments = (
        work.flag_table, work.flags[work.rank], work.epochs, work.alarm.words, work.alarm.limit, work.rank,
    )  # fmt: skip

    def launch() -> kernel_launch.Launch:
        constants = {"TP": tp, "CPU": not cuda, "THREADS": 32}
        return kernel_launch.by_triton(enter_kernel, 1, *arguments, **constants, num_warps=1), arguments

    if cuda:
        kernel_launch.first_or_again(work.kernels, ("enter", tp), 1, launch, work.data_table.device.index)
    else:
        launch()
