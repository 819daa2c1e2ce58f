"""All ranks begin a call together, as a kernel of one CTA: the barrier before what CUDA graphs replay.

See :mod:`megatron_flux.comm.slab`, *CUDA graphs*.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.plain.device import publish, wait_flags

OP_ENTER = tl.constexpr(3)


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
