"""All-reduce of a GEMM's partial results in one or two shots, alone or behind the GEMM of the same kernel.

``tp`` ranks have a partial result each, ``[m, n]`` in 16 or 32 bits; every rank ends with the sum of all.

One shot
    Every rank writes its whole partial into every rank's slab, its own included, reads the ``tp`` partials there and
    adds them in fp32. One trip over the link; ``tp - 1`` times the bytes of a result.

Two shots
    Every rank owns one of ``tp`` slices of the flat result. It receives the slice's partials, adds them in fp32, rounds
    once and sends the sum to all. Two trips over the link; ``2 (tp - 1) / tp`` times the bytes.

Flagless (Lamport-style): the payload doubles as its own ready flag
    An unused half of the slab holds the sentinel :data:`NOT_READY` everywhere: the bits of -0.0, twice in a 32-bit
    word. Senders turn -0.0 into 0.0 (in 32 bits: a number of 4.6e-41). So the receiver polls the numbers themselves
    until none is NOT_READY, and clears what it has read. That saves the sender a fence, which waits for the other end,
    and a second message. Stores may arrive in any order and size.

Shapes: ``x`` and ``y`` are flat, ``count`` numbers; x is the partial. Slots of the slab: ``[tp, stride]`` from the
half's beginning, of two shots as many again behind. With the GEMM ``a`` is ``[m, k]``, ``b`` ``[n, k]`` or ``[k, n]``,
and a slot holds tiles ``[BM, BN]``, each contiguous.

Deterministic, bit-equal on all ranks: the kernel fixes the order of addition, and every rank adds the same rounded
partials (in two shots: receives the same sum).

Hazards
    * The reuse of a half relies on :mod:`megatron_flux.comm.slab`: a kernel ends after it has read numbers of every
      peer. With two shots every rank must therefore own something: ``count > stride * (tp - 1)``.
    * A call must leave its half NOT_READY again: anything else there gives wrong sums, not a time-out. Only these
      kernels may use the slab.
    * Every CTA sends all it has before it waits, and waits for the same CTA of its peers alone (in two shots: for what
      these have sent before their second wait). CTAs that start late delay, and block nobody.
    * NaN and infinity pass; the sign of a zero partial does not.

Source: the protocol of low-latency all-reduces ("Lamport" in TensorRT-LLM); no code was taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_flux.kernels.device import OP_AR, cpu_now, cpu_waited, give_up, multiply, now, remaining_limit

NOT_READY = {2: -0x8000, 4: -0x7FFF8000}
"""Sentinel for a number that has not arrived, by bytes of a number."""


@triton.jit
def _sendable(bits, NOT_READY: tl.constexpr):
    return tl.where(bits == NOT_READY, bits * 0, bits)


@triton.jit
def _missing(bits, there, NOT_READY: tl.constexpr):
    return tl.max(tl.max(((bits == NOT_READY) & there).to(tl.int32), 1), 0)


@triton.jit
def _receive(
    slots, there, unit, epoch, err, limit, TP: tl.constexpr, NOT_READY: tl.constexpr, CPU: tl.constexpr
):  # fmt: skip
    """Wait for the numbers at ``slots`` ``[TP, BLOCK]`` that are ``there``, row r from rank r, clear and return them.
    ``unit`` is for a time-out's message.
    """
    bits = tl.load(slots, mask=there, other=0, volatile=True)
    if _missing(bits, there, NOT_READY) > 0:
        start = cpu_now() if CPU else now()
        if CPU:
            limit = remaining_limit(err, limit)
        missing = tl.full((), 1, tl.int32)
        while missing > 0:
            bits = tl.load(slots, mask=there, other=0, volatile=True)
            missing = _missing(bits, there, NOT_READY)
            if missing > 0:
                waited = cpu_waited(start) if CPU else now() - start
                if waited > limit:
                    rows = tl.arange(0, TP)
                    late = tl.max(((bits == NOT_READY) & there).to(tl.int32), 1)
                    peer = tl.min(tl.where(late > 0, rows, TP), 0)
                    give_up(err, OP_AR, peer, peer, unit, epoch, tl.full((), -1, tl.int32), CPU)
                    missing = tl.zeros_like(missing)
    tl.store(slots, tl.full(bits.shape, NOT_READY, bits.dtype), mask=there)
    return bits


@triton.jit
def _begin(epochs, slot, next_slot):
    """Return the call's epoch, and write the next call's at once: nobody reads it before this kernel ends."""
    epoch = tl.load(epochs + slot)
    if tl.program_id(0) == 0:
        tl.store(epochs + next_slot, epoch + 1)
    return epoch


@triton.jit(do_not_specialize=["slot", "next_slot", "rank", "limit"])
def one_shot_kernel(
    x, y, d0, d1, d2, d3, d4, d5, d6, d7, epochs, err, limit, slot, next_slot, half, stride, count, rank,
    TP: tl.constexpr, BLOCK: tl.constexpr, NOT_READY: tl.constexpr, CPU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See the module. ``d0`` … are the slabs of rank+1, rank+2, … and last, as number ``TP``, this rank's; ``half``:
    numbers in a half of it.
    """
    sinks = (d0, d1, d2, d3, d4, d5, d6, d7)
    epoch = _begin(epochs, slot, next_slot)
    base = tl.cast(slot, tl.int64) * half
    first = tl.program_id(0) * BLOCK
    for start in tl.range(first, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = _sendable(tl.load(x + at, mask=at < count, other=0), NOT_READY)
        for step in tl.static_range(TP):
            tl.store(sinks[step] + base + tl.cast(rank, tl.int64) * stride + at, bits, mask=at < count)
    rows = tl.arange(0, TP)[:, None]
    for start in tl.range(first, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        slots = sinks[TP - 1] + base + rows.to(tl.int64) * stride + at[None, :]
        there = (rows >= 0) & (at < count)[None, :]
        bits = _receive(slots, there, start // BLOCK, epoch, err, limit, TP, NOT_READY, CPU)
        total = tl.sum(bits.to(DTYPE, bitcast=True).to(tl.float32), 0)
        tl.store(y + at, total.to(DTYPE), mask=at < count)


@triton.jit(do_not_specialize=["slot", "next_slot", "rank", "limit"])
def two_shot_kernel(
    x, y, d0, d1, d2, d3, d4, d5, d6, d7, epochs, err, limit, slot, next_slot, half, stride, count, rank,
    TP: tl.constexpr, BLOCK: tl.constexpr, NOT_READY: tl.constexpr, CPU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """See the module, and :func:`one_shot_kernel`. Slice r begins at ``r * stride``; the last ones may be short."""
    sinks = (d0, d1, d2, d3, d4, d5, d6, d7)
    epoch = _begin(epochs, slot, next_slot)
    base = tl.cast(slot, tl.int64) * half
    first = tl.program_id(0) * BLOCK
    mine = tl.cast(rank, tl.int64) * stride
    rows = tl.arange(0, TP)[:, None]
    for start in tl.range(first, stride, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        for step in tl.static_range(TP):
            begins = tl.cast((rank + 1 + step) % TP, tl.int64) * stride
            inside = (at < stride) & (begins + at < count)
            bits = _sendable(tl.load(x + begins + at, mask=inside, other=0), NOT_READY)
            tl.store(sinks[step] + base + mine + at, bits, mask=inside)
    for start in tl.range(first, stride, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < stride) & (mine + at < count)
        slots = sinks[TP - 1] + base + rows.to(tl.int64) * stride + at[None, :]
        there = (rows >= 0) & inside[None, :]
        bits = _receive(slots, there, start // BLOCK, epoch, err, limit, TP, NOT_READY, CPU)
        total = tl.sum(bits.to(DTYPE, bitcast=True).to(tl.float32), 0)
        bits = _sendable(total.to(DTYPE).to(bits.dtype, bitcast=True), NOT_READY)
        for step in tl.static_range(TP):
            tl.store(sinks[step] + base + tl.cast(TP, tl.int64) * stride + mine + at, bits, mask=inside)
    for start in tl.range(first, stride, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        begins = rows.to(tl.int64) * stride
        there = (at < stride)[None, :] & (begins + at[None, :] < count)
        slots = sinks[TP - 1] + base + tl.cast(TP, tl.int64) * stride + begins + at[None, :]
        bits = _receive(slots, there, start // BLOCK, epoch, err, limit, TP, NOT_READY, CPU)
        tl.store(y + begins + at[None, :], bits.to(DTYPE, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["slot", "next_slot", "rank", "limit", "m"])  # one for decode steps of any m
def gemm_one_shot_kernel(
    a, b, y, d0, d1, d2, d3, d4, d5, d6, d7, epochs, err, limit, slot, next_slot, half, stride, m, n, k, rank,
    TP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr, NOT_READY: tl.constexpr, CPU: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``y = sum over ranks of a @ b.T`` in one shot; ``a`` and ``b`` are descriptors with ``TMA``, else pointers.
    ``ROWS`` of a tile are added at a time.
    """
    sinks = (d0, d1, d2, d3, d4, d5, d6, d7)
    epoch = _begin(epochs, slot, next_slot)
    base = tl.cast(slot, tl.int64) * half
    rows, cols, ranks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, TP)
    nrb, kt = tl.cdiv(m, BM), tl.cdiv(k, BK)
    tiles = nrb * tl.cdiv(n, BN)
    own = sinks[TP - 1] + base
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = (t % nrb) * BM, (t // nrb) * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        acc = multiply(acc, a, b, row, col, kt, m, n, k, BM, BN, BK, TRANSPOSED, TMA, CPU)
        bits = _sendable(acc.to(DTYPE).to(own.dtype.element_ty, bitcast=True), NOT_READY)
        at = tl.cast(rank, tl.int64) * stride + t * (BM * BN) + rows[:, None] * BN + cols[None, :]
        inside = (row + rows < m)[:, None] & (col + cols < n)[None, :]
        for step in tl.static_range(TP):
            tl.store(sinks[step] + base + at, bits, mask=inside)
    part = tl.arange(0, ROWS * BN)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = (t % nrb) * BM, (t // nrb) * BN
        for piece in tl.range(0, tl.cdiv(tl.minimum(m - row, BM), ROWS)):
            at_row, at_col = row + piece * ROWS + part // BN, col + part % BN
            inside = (at_row < m) & (at_col < n)
            slots = own + ranks[:, None].to(tl.int64) * stride + (t * (BM * BN) + piece * (ROWS * BN) + part)[None, :]
            there = (ranks >= 0)[:, None] & inside[None, :]
            bits = _receive(slots, there, t, epoch, err, limit, TP, NOT_READY, CPU)
            total = tl.sum(bits.to(DTYPE, bitcast=True).to(tl.float32), 0)
            tl.store(y + at_row.to(tl.int64) * n + at_col, total.to(DTYPE), mask=inside)
