"""Device functions that kernels share: bounded waits, publication of flags, tile order, fences, the main loop.

The Hopper kernels, in Gluon, call those that name no layout: :func:`now`, :func:`give_up`, :func:`publish`,
:func:`leave`, :func:`take`, :func:`raster`, :func:`scatter_place`.

Flags
    A flag is an int32. A rank that has moved data into a peer's memory writes the *epoch* of the call into the peer's
    flag; the reader waits until ``flag - epoch >= 0`` (two's complement, so the epoch may wrap). Nothing is reset
    between calls: an older call's epoch is smaller. That holds for fewer than 2^31 calls, and some flags are written
    only by the largest shape. So slabs are replaced before (:data:`megatron_flux.comm.slab.MOST_CALLS`), and those that
    CUDA graphs hold have all their flags rewritten (:func:`enter_kernel`).

Hazards
    * A bulk (TMA) store is ordered before a flag only after ``cp.async.bulk.wait_group 0``; the ``.read`` form that
      Triton emits on its own says only that shared memory may be reused.
    * A value read through a TMA descriptor after a generic-proxy acquire needs ``fence.proxy.async`` in between.
    * Triton never moves a load above a volatile one; the waits are volatile loads followed by a fence.

A wait that exceeds its limit writes ``[code, op, peer, unit, epoch, seen]`` to host-visible memory and traps: the
process ends non-zero and :mod:`megatron_flux.comm.timeouts` prints what it waited for. Under Triton's interpreter
(``CPU``) a wait yields the processor to the peer, and the kernel goes on to its end, without further waits, instead of
trapping.

Source: PTX ISA, "Memory consistency model" and "cp.async.bulk".
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

REFRESH_BITS = tl.constexpr(30)
"""A graph's flags are rewritten when its epoch has grown by 2 to the power of this."""

MOST_CTAS = tl.constexpr(256)
"""CTAs of a kernel at most, one on an SM; :data:`megatron_flux.comm.slab.MOST_CTAS` has room for them."""

# Operator codes in alarms; :mod:`megatron_flux.comm.timeouts` has the names.
OP_AG = tl.constexpr(1)
OP_RS = tl.constexpr(2)
OP_ENTER = tl.constexpr(3)
OP_GATHER = tl.constexpr(4)
OP_AR = tl.constexpr(8)


@triton.jit
def now():
    """Return the GPU's clock in nanoseconds."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.constexpr_function
def cpu_now():
    """Return the CPU's clock in nanoseconds, for Triton's interpreter."""
    import time  # here: Triton refuses kernels whose module has it, even where they do not call this

    return time.monotonic_ns()


@triton.constexpr_function
def cpu_waited(start):
    """Return the nanoseconds since ``start``, after a pause that grows to 5 ms: the peer may need this core."""
    import time

    begun = int(start)
    time.sleep(min((time.monotonic_ns() - begun) / 4, 5e6) / 1e9)
    return time.monotonic_ns() - begun


@triton.jit
def _each_thread(ASM: tl.constexpr, THREADS: tl.constexpr):
    """Run ``ASM`` in every thread of the CTA."""
    tl.inline_asm_elementwise(
        ASM + " mov.u32 $0, $1;", "=r,r", [tl.arange(0, THREADS)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def acquire_fence(CPU: tl.constexpr, THREADS: tl.constexpr):
    """Order polled values before everything after them, for both proxies: GPUs before Hopper have one."""
    if not CPU:
        ORDER: tl.constexpr = "fence.acq_rel.sys;" + (" fence.proxy.async;" if cuda_capability_geq(9, 0) else "")
        _each_thread(ORDER, THREADS)


@triton.jit
def release_fence(CPU: tl.constexpr, THREADS: tl.constexpr):
    """Order writes that this thread has seen before its relaxed writes that follow."""
    if not CPU:
        _each_thread("fence.acq_rel.sys;", THREADS)


@triton.jit
def bulk_stores_done(CPU: tl.constexpr, THREADS: tl.constexpr):
    """Wait until this CTA's TMA stores have reached memory, wherever it is; GPUs before Hopper have none."""
    if not CPU and cuda_capability_geq(9, 0):
        _each_thread("cp.async.bulk.wait_group 0;", THREADS)


@triton.jit
def _trap(code):
    return tl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [code], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def give_up(err, op: tl.constexpr, peer, first, unit, epoch, behind, CPU: tl.constexpr):
    """Write an alarm, that ``peer`` (``first`` if negative) is ``behind`` (negative) the epoch, and trap."""
    tl.store(err + 1, op)
    tl.store(err + 2, tl.where(peer >= 0, peer, first))
    tl.store(err + 3, unit)
    tl.store(err + 4, epoch)
    tl.store(err + 5, behind + epoch)
    tl.debug_barrier()
    tl.atomic_xchg(err, 1, sem="release", scope="sys")
    if not CPU:
        tl.debug_barrier()
        _trap(epoch)


@triton.jit
def remaining_limit(err, limit):
    """Return 0 if an earlier wait of this launch has timed out, else ``limit``."""
    return tl.where(tl.load(err) == 0, limit, 0)


@triton.jit
def wait_flags(
    flags, COUNT: tl.constexpr, count, epoch, err, limit, op: tl.constexpr, peer, unit,
    CPU: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Spin until the first ``count`` (at most ``COUNT``) of ``flags`` have reached ``epoch``. ``peer`` is the rank that
    is waited for; if it is negative, the index of the first flag that is behind.
    """
    lane = tl.arange(0, COUNT)
    ahead = tl.load(flags + lane, mask=lane < count, other=0, volatile=True) - epoch
    behind = tl.min(tl.where(lane < count, ahead, 0))
    if behind < 0:
        start = cpu_now() if CPU else now()
        if CPU:
            limit = remaining_limit(err, limit)
        while behind < 0:
            seen = tl.load(flags + lane, mask=lane < count, other=0, volatile=True)
            ahead = tl.where(lane < count, seen - epoch, 0)
            behind = tl.min(ahead)
            if behind < 0:
                waited = cpu_waited(start) if CPU else now() - start
                if waited > limit:
                    first = tl.min(tl.where(ahead < 0, lane, COUNT))
                    give_up(err, op, peer, first, unit, epoch, behind, CPU)
                    behind = tl.zeros_like(behind)
    acquire_fence(CPU, THREADS)


@triton.jit
def publish(address, offset, epoch, sem: tl.constexpr):
    """Write ``epoch`` into word ``offset`` of the flags at ``address`` (int64). With ``sem="release"`` it follows all
    that this CTA wrote before a barrier; else the caller has fenced.
    """
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)) + offset, epoch, sem=sem, scope="sys")


@triton.jit
def leave(ctrl, epochs, epoch, next_slot, CTAS: tl.constexpr):
    """Reset the call's counters and write the next call's epoch, in the last CTA to arrive."""
    tl.debug_barrier()
    if tl.atomic_add(ctrl + 1, 1, sem="acq_rel", scope="gpu") == CTAS - 1:
        tl.store(ctrl, 0)
        tl.store(ctrl + 1, 0)
        tl.store(epochs + next_slot, epoch + 1)


@triton.jit
def take(taken, share, epoch):
    """Return True if no CTA has taken the share before in this call."""
    return tl.atomic_xchg(taken + share, epoch, sem="relaxed", scope="gpu") != epoch


@triton.jit
def raster(u, rows, cols, GROUP: tl.constexpr):
    """Return tile ``u`` of ``rows`` x ``cols`` tiles, ``GROUP`` rows at a time so that both operands stay in L2."""
    width = GROUP * cols
    first = (u // width) * GROUP
    height = min(rows - first, GROUP)
    return first + (u % width) % height, (u % width) // height


@triton.jit
def scatter_place(t, nrb, npn, BAND: tl.constexpr, STEPS: tl.constexpr):
    """Return tile ``t`` of a GEMM + reduce-scatter as (step, row block, column block); step ``s`` is for rank
    ``rank+1+s``. With one step, tiles are for all ranks, in the order of :func:`raster`.
    """
    if STEPS == 1:
        rb, pn = raster(t, nrb, npn, BAND)
        return t * 0, rb, pn
    else:  # noqa: RET505 - one of the two is compiled
        return _by_destination(t, nrb, npn, BAND, STEPS)


@triton.jit
def _by_destination(t, nrb, npn, BAND: tl.constexpr, TP: tl.constexpr):
    """Bands are counted from the last row block: if they do not divide the rows, the first one is short. Within a band
    destinations alternate; in the last band the local tiles, for which no peer waits, come after all others.
    """
    first = nrb - ((nrb - 1) // BAND) * BAND
    u = t
    base = nrb * 0
    height = first
    if t >= first * TP * npn:
        u = t - first * TP * npn
        base = first + (u // (BAND * TP * npn)) * BAND
        height = nrb * 0 + BAND
        u = u % (BAND * TP * npn)
    width = height * TP
    step = (u % width) % TP
    rb = (u % width) // TP
    pn = u // width
    if base + height >= nrb:
        remote = height * (TP - 1)
        if u < remote * npn:
            step = (u % remote) % (TP - 1)
            rb = (u % remote) // (TP - 1)
            pn = u // remote
        else:
            v = u - remote * npn
            step = v * 0 + TP - 1
            rb = v % height
            pn = v // height
    return step, base + rb, pn


@triton.jit
def split_columns(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Split a tile into its left and right half: stored one after the other they need half the shared memory."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def rounded_product(a, b, CPU: tl.constexpr):
    """``a * b``; see :mod:`megatron_flux.kernels.hopper.scaled` for why it is rounded also where a sum follows."""
    if CPU:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


@triton.jit
def multiply(
    acc, a, b, row, col, kt, row_end, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TRANSPOSED: tl.constexpr, TMA: tl.constexpr, CPU: tl.constexpr, xs=None, ld=0, left=0, ws=None, ldw=0,
    SCALES: tl.constexpr = None, PROMOTE: tl.constexpr = False,
):  # fmt: skip
    """``acc += a[row:row+BM, :] @ b[:, col:col+BN]`` over ``kt`` blocks of k. With ``TMA`` a and b are descriptors,
    else pointers to contiguous ``[row_end, k]`` and ``[n, k]`` (``[k, n]`` if ``TRANSPOSED``); what lies outside reads
    as zero.

    FP8: with ``PROMOTE`` sums of BK, at most 128, products go to fp32. With ``SCALES`` "blocks" those are scaled by
    ``xs[block * ld + r]``, of which there are ``left`` rows from the tile's first, and ``ws[column // 128 * ldw +
    block]``, where a block is 128 of k.
    """
    for ki in range(0, kt):
        if TMA:
            x = a.load([row, ki * BK])
            if TRANSPOSED:
                y = b.load([ki * BK, col])
            else:
                y = b.load([col, ki * BK]).T
        else:
            rows = row + tl.arange(0, BM)
            cols = col + tl.arange(0, BN)
            ks = ki * BK + tl.arange(0, BK)
            x = tl.load(
                a + rows.to(tl.int64)[:, None] * k + ks[None, :],
                mask=(rows < row_end)[:, None] & (ks < k)[None, :],
                other=0.0,
            )
            if TRANSPOSED:
                y = tl.load(
                    b + ks.to(tl.int64)[:, None] * n + cols[None, :],
                    mask=(ks < k)[:, None] & (cols < n)[None, :],
                    other=0.0,
                )
            else:
                y = tl.load(
                    b + cols.to(tl.int64)[None, :] * k + ks[:, None],
                    mask=(ks < k)[:, None] & (cols < n)[None, :],
                    other=0.0,
                )
        if CPU:  # the interpreter multiplies bf16 by its bits
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        if SCALES == "blocks":
            block = ki * BK // 128
            lane = tl.arange(0, BM)
            scaled = col + tl.arange(0, BN)
            by_row = tl.load(xs + block.to(tl.int64) * ld + lane, mask=lane < left, other=0.0, cache_modifier=".cg")
            by_column = tl.load(ws + scaled // 128 * ldw + block, mask=scaled < n, other=0.0)
            acc += tl.dot(x, y) * by_row[:, None] * by_column[None, :]
        elif PROMOTE:
            acc = tl.dot(x, y, acc, max_num_imprecise_acc=BK)
        else:
            acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def gate_kernel(err, CPU: tl.constexpr):
    """Trap if the alarm ``err`` says that a wait was given up. This ends a call whose waits are memory operations of a
    stream, which have no limit and cannot fail: :mod:`megatron_flux.comm.host_progress` writes the alarm and lets the
    stream run on. One warp and one load, which never waits, between what the stream has then copied and what reads it.
    """
    code = tl.load(err, volatile=True)
    if code == 1:
        if not CPU:
            _trap(code)


@triton.jit(do_not_specialize=["rank", "limit"])
def enter_kernel(
    table, flags, epochs, err, limit, rank, words, TP: tl.constexpr, CPU: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Tell every peer that this rank has begun a call that uses half 0, and return once all have. The call's epoch is
    the larger of ``epochs`` ``[2]``: whichever half the latest call used, it left its successor's number in the other's
    word. Flags: the first ``tp`` words of half 0, whose addresses on all ranks are in ``table``.

    Now and then all other ``words`` of the slab's flags are set to the epoch before, behind that barrier, when no call
    is under way, and before a second one of ``tp`` words more. The word behind says when that was last.
    """
    first = tl.load(epochs)
    second = tl.load(epochs + 1)
    epoch = tl.where(second - first > 0, second, first)  # a difference, since epochs may wrap
    tl.store(epochs, epoch)
    for step in tl.static_range(TP):
        publish(tl.load(table + (rank + 1 + step) % TP), rank, epoch, "release")
    wait_flags(flags, TP, TP, epoch, err, limit, OP_ENTER, -1, 0, CPU, THREADS)
    refreshed = flags + 2 * TP
    if ((epoch - tl.load(refreshed)) >> REFRESH_BITS) != 0:
        lane = tl.arange(0, 1024)
        for start in range(0, words, 1024):
            tl.store(flags + start + lane, lane * 0 + epoch - 1, mask=start + lane > 2 * TP)
        tl.store(refreshed, epoch)
        tl.debug_barrier()
        for step in tl.static_range(TP):
            publish(tl.load(table + (rank + 1 + step) % TP), TP + rank, epoch, "release")
        wait_flags(flags + TP, TP, TP, epoch, err, limit, OP_ENTER, -1, 0, CPU, THREADS)


@triton.jit(do_not_specialize=["slot", "words", "rank", "limit"])
def start_kernel(
    table, flags, epochs, err, limit, rank, slot, words, TP: tl.constexpr, CPU: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Tell every peer that this rank has come to the call whose epoch is in ``epochs[slot]``, and return once all have.
    Flags: ``[tp]`` from word ``words`` on, whose addresses on all ranks are in ``table``.
    """
    epoch = tl.load(epochs + slot)
    for step in tl.static_range(TP):
        publish(tl.load(table + (rank + 1 + step) % TP), words + rank, epoch, "relaxed")
    wait_flags(flags + words, TP, TP, epoch, err, limit, OP_ENTER, -1, 0, CPU, THREADS)


@triton.jit(do_not_specialize=["slot", "next_slot", "flag_off", "rank", "limit"])
def gather_wait_kernel(
    flags, ctrl, epochs, err, limit, slot, next_slot, flag_off, rank,
    TP: tl.constexpr, CPU: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Return once every peer's shard of a gather has arrived. Flags ``[tp]``, word ``r`` set by rank ``r``."""
    epoch = tl.load(epochs + slot)
    for step in range(1, TP):
        src = (rank + step) % TP
        wait_flags(flags + flag_off + src, 1, 1, epoch, err, limit, OP_GATHER, src, 0, CPU, THREADS)
    leave(ctrl, epochs, epoch, next_slot, 1)
