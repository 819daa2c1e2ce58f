"""Waiting for a gather that the copy engine performs, as a kernel of one CTA."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.plain.device import OP_GATHER, leave, wait_flags


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
