"""Two kernels of one CTA that wait for all peers: the barrier before captured calls, and the end of a gather.

Why captured calls need a barrier: :mod:`megatron_flux.comm.slab`, *CUDA graphs*.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.device import OP_ENTER, OP_GATHER, leave, publish, wait_flags


@triton.jit(do_not_specialize=["rank", "limit"])
def enter_kernel(
    table,
    flags,
    epochs,
    err,
    limit,
    rank,
    TP: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Tell every peer that this rank has begun a call that uses half 0, and return once all have.

    The call's epoch is the larger of ``epochs`` ``[2]``: whichever half the latest call used, it left its successor's
    number in the other's word. Flags: the first ``tp`` words of half 0, whose addresses on all ranks are in ``table``.
    """
    first = tl.load(epochs)
    second = tl.load(epochs + 1)
    epoch = tl.where(second - first > 0, second, first)  # a difference, since epochs may wrap
    tl.store(epochs, epoch)
    for step in tl.static_range(TP):
        publish(tl.load(table + (rank + 1 + step) % TP), rank, epoch, "release")
    wait_flags(flags, TP, TP, epoch, err, limit, OP_ENTER, -1, 0, CPU, THREADS)


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
    """Return once every peer's shard of a gather has arrived. Flags ``[tp]``, word ``r`` set by rank ``r``."""
    epoch = tl.load(epochs + slot)
    for step in range(1, TP):
        src = (rank + step) % TP
        wait_flags(flags + flag_off + src, 1, 1, epoch, err, limit, OP_GATHER, src, 0, CPU, THREADS)
    leave(ctrl, epochs, epoch, next_slot, 1)
