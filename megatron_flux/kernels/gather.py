"""Before and behind a gather that the copy engine performs: kernels of one CTA."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.device import OP_GATHER, enter, leave, wait_flags


@triton.jit(do_not_specialize=["entered_off", "rank", "limit"])
def gather_enter_kernel(
    flag_table,
    flags,
    entered_off,
    epochs,
    err,
    limit,
    rank,
    TP: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Return once every peer has begun this captured call, and leave its epoch where copies read it: ``epochs[1]``,
    which stays as it is until the next call, while ``epochs[0]`` is advanced when the GEMM is finished.
    """
    epoch = tl.load(epochs)
    enter(flag_table, flags, entered_off, rank, epoch, err, limit, TP, CPU, THREADS)
    tl.store(epochs + 1, epoch)


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit"])
def gather_wait_kernel(
    flags,
    ctrl,
    epochs,
    err,
    limit,
    slot,
    next_slot,
    flag_off,
    rank,
    TP: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Return once every peer's shard has arrived. Flags ``[tp]``, as ``ag_gemm`` with one block and one chunk."""
    epoch = tl.load(epochs + slot)
    for step in range(1, TP):
        src = (rank + step) % TP
        wait_flags(flags + flag_off + src, 1, 1, epoch, err, limit, OP_GATHER, src, 0, CPU, THREADS)
    leave(ctrl, epochs, epoch, next_slot, 1)
