"""All-gather + GEMM as one persistent kernel: ``c = all_gather(x) @ w``.

Shapes (``tp`` ranks, ``mp = m/tp`` rows each)
    ``x`` ``[mp, k]`` and ``b`` ``[n, k]`` (``[k, n]`` if TRANSPOSED) are local, ``c`` is ``[m, n]``. ``a`` is this
    rank's gather buffer ``[m, k]``, which every rank writes to. Flags: ``[tp]``, word ``r`` set once the shard of rank
    ``r`` has arrived.

Schedule
    The own shard, which is in the buffer before the launch, comes first, then those of rank+1, rank+2, …: the order in
    which they arrive. A tile waits for its shard; nothing waits when the kernel begins. The copy engine moves the
    shards (:mod:`megatron_flux.comm.copy_engine`), which takes no SM from the GEMM.

Guarantees
    Bitwise deterministic, and bit-equal to the same kernel on a gathered input: the order of the k loop is fixed.

Hazards
    * The copies must be enqueued before the kernel, or one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) deadlocks.
    * Another *kernel* must never publish a flag that this one waits for while it occupies every SM.
    * Rows that do not fill a tile are computed from whatever follows them and masked at the store (MASK_ROWS).

Measured (4 x H200, results/ops-h200x4-nvlink-triton)
    Pushes by some SMs of this kernel reached 18-26 GB/s per SM and lost to the copy engine in all but one of eight
    tuned calls (m=8192, n=2048, k=8192, which Hopper's own kernel now runs faster than either); copies paced to one
    writer per receiver were within 3 % of unpaced ones. Neither is here any more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.device import OP_AG, leave, multiply, raster, split_columns, wait_flags


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit"])
def ag_gemm_kernel(
    a,
    b,
    c,
    bias,
    flags,
    ctrl,
    epochs,
    err,
    limit,
    slot,
    next_slot,
    flag_off,
    m,
    n,
    k,
    mp,
    rank,
    TP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    CTAS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    CPU: tl.constexpr,
    THREADS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """See the module. ``bias`` ``[n]`` is added before rounding, if ``BIAS``.

    With ``TMA`` ``a`` and ``b`` are descriptors, else pointers; so is ``c``, but a pointer with ``MASK_ROWS``.
    """
    epoch = tl.load(epochs + slot)
    nrb = tl.cdiv(mp, BM)
    npn = tl.cdiv(n, BN)
    kt = tl.cdiv(k, BK)
    for t in tl.range(tl.program_id(0), nrb * npn * TP, CTAS):
        src = (rank + t // (nrb * npn)) % TP
        pm, pn = raster(t % (nrb * npn), nrb, npn, GROUP)
        row = src * mp + pm * BM
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        if BIAS:
            cols = pn * BN + tl.arange(0, BN)
            acc += tl.load(bias + cols, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        if src != rank:
            wait_flags(flags + flag_off + src, 1, 1, epoch, err, limit, OP_AG, src, 0, CPU, THREADS)
        acc = multiply(acc, a, b, row, pn * BN, kt, m, n, k, BM, BN, BK, TRANSPOSED, TMA, CPU)
        if TMA and not MASK_ROWS:
            if SPLIT:
                left, right = split_columns(acc, BM, BN)
                c.store([row, pn * BN], left.to(DTYPE))
                c.store([row, pn * BN + BN // 2], right.to(DTYPE))
            else:
                c.store([row, pn * BN], acc.to(DTYPE))
        else:
            rows = pm * BM + tl.arange(0, BM)
            cols = pn * BN + tl.arange(0, BN)
            offs = (src * mp + rows).to(tl.int64)[:, None] * n + cols[None, :]
            tl.store(c + offs, acc.to(DTYPE), mask=(rows < mp)[:, None] & (cols < n)[None, :])
    leave(ctrl, epochs, epoch, next_slot, CTAS)
