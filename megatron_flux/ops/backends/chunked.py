"""The ``chunked`` backends: cuBLAS multiplies what has arrived while the rest is on its way, over any transport.

For groups without NVLink. Shards are moved in pieces by a transport (:mod:`megatron_flux.comm.transports`): through
host memory or peers' memory of one host. ``all_gather_gemm`` multiplies the local shard first, then each piece of
each peer as it arrives; ``gemm_reduce_scatter`` multiplies peers' rows first and sends each piece as soon as it is
there, the local shard last, and then adds all in fp32, in a fixed order: results are the same in every run.

==================  =====================================================================================
name                what travels (:mod:`megatron_flux.kernels.wire`)
==================  =====================================================================================
``chunked``         the numbers as they are: gathered inputs are bit-equal
``chunked_int8``    integers of 8 bits in rotated blocks of 128 with a scale: half the bytes of bf16
==================  =====================================================================================

FP8 operands (:mod:`megatron_flux.ops.fp8_operand`) are gathered as they are by both, their bytes in pieces and the
scales of their blocks before them; what a reduce-scatter sends of them are partial sums in bf16, as of others.

The local shard is never quantised: it is not sent. With an 8-bit wire the gathered inputs of two ranks
therefore differ in the rows of these two.

Contract: that of :mod:`megatron_flux.ops.call`. Results, and gathered inputs, are fresh tensors.
Limits: CUDA graphs over a transport that can be captured only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.timeouts import poison_on_error
from megatron_flux.comm.transports import transport_of
from megatron_flux.kernels import wire as wires
from megatron_flux.ops.backend import Backend, BackendPlan, Plan
from megatron_flux.ops.call import OperatorCall, compare_calls, matrix
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.fp8_operand import Fp8Operand, Fp8Pair
from megatron_flux.ops.gemm import fp8_gemm

PIECE_BYTES = 12 << 20
"""A shard is cut into pieces of about this size unless the tuner knows better: smaller ones hide more, make GEMMs of
fewer rows and take more host time."""
MOST_PIECES, LEAST_ROWS = 4, 256
ROWS_AT_ONCE = 16
"""A piece of an FP8 operand has a multiple of these rows: cuBLASLt takes scales of blocks by four rows."""
COUNTS, LEAST_BYTES = (2, 4, 8, 16), 1 << 20
"""Numbers of pieces that the tuner tries, and the smallest piece."""


def pieces_of(rows: int, width: int) -> int:
    """Return the number of pieces of a shard of ``rows`` of ``width`` bytes."""
    return max(1, min(MOST_PIECES, rows * width // PIECE_BYTES, rows // LEAST_ROWS))


def piece_counts(call: OperatorCall) -> list[int]:
    """Return the possible numbers of pieces for a shard of ``call``."""
    scatters = call.operator == "gemm_reduce_scatter"
    rows, width = call.m // call.group.size(), call.n if scatters else call.k
    size = call.out.itemsize if scatters else call.x.element_size()
    most = min(rows * width * size // LEAST_BYTES, 2 * rows // LEAST_ROWS)
    return [count for count in COUNTS if count <= most] or [1]


class ChunkedBackend(Backend):
    """See the module."""

    operators = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")

    def __init__(self, name: str = "chunked", wire: str = wires.EXACT) -> None:
        """``wire``: one of :data:`megatron_flux.settings.WIRES`."""
        self.name, self.wire = name, wire
        self.pieces: int | None = None
        """Pieces of a shard; None chooses by size. For tests."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return the first limit that these operands meet, or None."""
        return _why_not_captured(x, group) if x.is_cuda and capturing(x) else None

    def plan(self, call: OperatorCall, pieces: int | None = None) -> Plan:
        """See the base class; ``pieces`` of a shard, None: by its size."""
        plan = BackendPlan(self, call, pieces=pieces)
        plan.nbytes = self.bytes_received(call)
        return plan

    def bytes_received(self, call: OperatorCall) -> int:
        """Return the bytes that a rank receives for ``call``: 8-bit wire formats send fewer."""
        scatters = call.operator == "gemm_reduce_scatter"
        if self.wire == wires.EXACT or (call.fp8 is not None and not scatters):
            return call.bytes_received
        peers, rows = call.group.size() - 1, call.m // call.group.size()
        return peers * wires.nbytes(self.wire, rows, call.n if scatters else call.k, call.out.itemsize)

    def all_gather_gemm(
        self, call: OperatorCall, pieces: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | Fp8Operand]:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        if call.fp8 is not None:
            return self._all_gather_gemm_fp8(call, call.fp8, pieces)
        (mp, k), x, gemm = call.x.shape, call.x, _gemm(call)
        y, full = x.new_empty(call.m, call.n), x.new_empty(call.m, k)
        own = call.group.rank() * mp
        gather = _Gathered(self, call, full, pieces)
        with poison_on_error(gather.transport, call.operator):
            gather.begin()
            gemm(x, y[own : own + mp])
            if call.return_gathered:
                full[own : own + mp].copy_(x)
            for peer, piece in gather.flight:
                rows = gather.decoded(peer, piece)
                gemm(full[rows], y[rows])
        return y, full

    def _all_gather_gemm_fp8(
        self, call: OperatorCall, pair: Fp8Pair, pieces: int | None
    ) -> tuple[torch.Tensor, Fp8Operand]:
        x, tp, rank = pair.x, call.group.size(), call.group.rank()
        (mp, k), scales = x.data.shape, x.scale_inv
        y, full = x.data.new_empty(call.m, call.n, dtype=pair.out), x.data.new_empty(call.m, k)
        all_scales = scales.new_empty(tp, *scales.shape) if pair.blocks else scales
        gathers = [_Gathered(self, call, full, pieces, x.data)]
        if pair.blocks:  # first, on their own: 4 bytes for 128
            gathers.insert(0, _Gathered(self, call, all_scales.view(-1, scales.shape[1]), 1, scales))
        transport, own = gathers[0].transport, slice(rank * mp, (rank + 1) * mp)
        with poison_on_error(transport, call.operator):
            for ahead in gathers[:-1]:
                ahead.begin()
                ahead.flight.enqueue()
            gathers[-1].begin()
            fp8_gemm(pair, call.bias, out=y[own])
            if call.return_gathered:
                full[own].copy_(x.data)
            for ahead in gathers[:-1]:
                ahead.flight.wait()
                all_scales[rank].copy_(scales)
            gathered = Fp8Operand(full, x.dtype, all_scales, x.scaling, tp)
            for peer, piece in gathers[-1].flight:
                rows = gathers[-1].decoded(peer, piece)
                part = gathered.shard(peer).part(rows.start - peer * mp, rows.stop - peer * mp)
                fp8_gemm(pair._replace(x=part), call.bias, out=y[rows])
        return y, gathered

    def all_gather(self, call: OperatorCall, pieces: int | None = None) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        (mp, k), x = call.x.shape, call.x
        full = x.new_empty(call.m, k)
        own = call.group.rank() * mp
        gather = _Gathered(self, call, full, pieces)
        with poison_on_error(gather.transport, call.operator):
            gather.begin()
            gather.flight.enqueue()
            full[own : own + mp].copy_(x)
        begun = torch.cuda.current_stream(x.device) if x.is_cuda else None

        def wait() -> None:
            with poison_on_error(gather.transport, call.operator):
                gather.flight.wait()
                gather.decode_all()
            _used_behind(begun, gather.arrived)

        return Pending(full, wait, keep=(x, full))

    def gemm_reduce_scatter(self, call: OperatorCall, pieces: int | None = None) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`. With ``async_op`` the transfers that are left when
        the GEMMs have ended run beside what comes next.
        """
        compare_calls(call)
        x, n, group, wire = call.x, call.n, call.group, self.wire
        tp, rank = group.size(), group.rank()
        mp, size = call.m // tp, call.out.itemsize
        rows, cuts = _cut(wire, mp, n, size, pieces or self.pieces, 1 if call.fp8 is None else ROWS_AT_ONCE)
        transport, known, gemm = transport_of(group, x.device), state_of(group).kernels, _gemm_of_rows(call)
        # All memory before the call begins: peers would wait for one that ends in between.
        theirs = x.new_empty(tp, cuts[-1], dtype=torch.uint8)
        sent = x.new_empty(tp, cuts[-1], dtype=torch.uint8)
        empty = functools.partial(x.new_empty, dtype=call.out)
        y, own = empty(mp, n), empty(mp, n)
        partial = None if wire == wires.EXACT else empty(max(b - a for a, b in itertools.pairwise(rows)), n)
        with poison_on_error(transport, call.operator):
            if (table := state_of(group).table) is not None:
                table.enter()
            exchange = transport.exchange(call.operator, theirs, cuts)
            for peer, piece in exchange.steps:
                first, last = rows[piece], rows[piece + 1]
                block = sent[peer, cuts[piece] : cuts[piece + 1]]
                part = block.view(call.out).view(-1, n) if partial is None else partial[: last - first]
                gemm(peer * mp + first, peer * mp + last, part)
                if partial is not None:
                    wires.encode(part, block, known)
                exchange.send(block)
            gemm(rank * mp, (rank + 1) * mp, own)
            exchange.enqueue()

        begun = torch.cuda.current_stream(x.device) if x.is_cuda and call.async_op else None

        def wait() -> None:
            with poison_on_error(transport, call.operator):
                exchange.wait()
                if wire == wires.EXACT:
                    wires.add(wire, theirs, own, rank, y, known)
                else:
                    for (first, last), data in zip(itertools.pairwise(rows), itertools.pairwise(cuts), strict=True):
                        wires.add(wire, theirs[:, slice(*data)], own[first:last], rank, y[first:last], known)
            _used_behind(begun, theirs, sent, own)

        pending = Pending(y, wait, keep=(x, theirs, sent, own))
        if not call.async_op:
            pending.wait()
        return pending


class _Gathered:
    """The gather of a call into ``full`` ``[m, k]``, but for the local shard."""

    def __init__(
        self,
        backend: ChunkedBackend,
        call: OperatorCall,
        full: torch.Tensor,
        pieces: int | None,
        exactly: torch.Tensor | None = None,
    ) -> None:
        """Allocates; nothing has begun. ``exactly``: what is gathered instead of x, as it is."""
        compare_calls(call)
        x = call.x if exactly is None else exactly
        self._call, self._wire, self._full = call, wires.EXACT if exactly is not None else backend.wire, full
        (self._mp, k), size, tp = x.shape, x.element_size(), call.group.size()
        at_once = 1 if exactly is None else ROWS_AT_ONCE
        self._rows, self._cuts = _cut(self._wire, self._mp, k, size, pieces or backend.pieces, at_once)
        self.transport, self._known = transport_of(call.group, x.device), state_of(call.group).kernels
        exact = self._wire == wires.EXACT
        self.arrived = (
            full.view(tp, -1).view(torch.uint8) if exact else x.new_empty(tp, self._cuts[-1], dtype=torch.uint8)
        )
        self._mine = x.view(-1).view(torch.uint8) if exact else x.new_empty(self._cuts[-1], dtype=torch.uint8)

    def begin(self) -> None:
        """Send what this rank has."""
        if self._wire != wires.EXACT:
            for piece in range(len(self._rows) - 1):
                part = self._call.x[self._rows[piece] : self._rows[piece + 1]]
                wires.encode(part, self._mine[self._cuts[piece] : self._cuts[piece + 1]], self._known)
        if (table := state_of(self._call.group).table) is not None:
            table.enter()
        self.flight = self.transport.gather(self._call.operator, self._mine, self.arrived, self._cuts)

    def decoded(self, peer: int, piece: int) -> slice:
        """Decode a piece that has arrived, and return its rows of ``full``."""
        rows = slice(peer * self._mp + self._rows[piece], peer * self._mp + self._rows[piece + 1])
        if self._wire != wires.EXACT:
            data = self.arrived[peer, self._cuts[piece] : self._cuts[piece + 1]]
            wires.decode(data, self._full[rows], self._known)
        return rows

    def decode_all(self) -> None:
        """Decode all rows. All must have arrived."""
        group = self._call.group
        for peer in range(group.size()):
            for piece in range(len(self._rows) - 1) if peer != group.rank() else ():
                self.decoded(peer, piece)


@functools.lru_cache(maxsize=1024)
def _cut(
    wire: str, rows: int, width: int, itemsize: int, pieces: int | None, at_once: int = 1
) -> tuple[list[int], list[int]]:
    """Return where the pieces of a shard of ``rows`` x ``width`` begin: in rows, multiples of ``at_once``, and in bytes
    on the wire, where each piece is encoded by itself.
    """
    blocks = -(-rows // at_once)
    count = max(1, min(pieces, blocks)) if pieces else min(pieces_of(rows, width * itemsize), blocks)
    by_rows = [min(rows, blocks * piece // count * at_once) for piece in range(count + 1)]
    sizes = (wires.nbytes(wire, last - first, width, itemsize) for first, last in itertools.pairwise(by_rows))
    return by_rows, [0, *itertools.accumulate(sizes)]


def _used_behind(begun: torch.cuda.Stream | None, *parts: torch.Tensor) -> None:
    """Call ``record_stream`` on ``parts``, allocated on the stream ``begun``, if the current stream is another one.
    ``begun`` does not wait for that stream, so the allocator must.
    """
    if begun is not None and (now := torch.cuda.current_stream(begun.device)) != begun:
        for part in parts:
            part.record_stream(now)


def _gemm(call: OperatorCall) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return ``f(x, out)``, which multiplies rows of x by the weight, and adds the bias where the call has one."""
    weight = call.weight if call.transposed else call.weight.t()  # type: ignore[union-attr]
    if (bias := call.bias) is None:
        return lambda x, out: torch.mm(x, weight, out=out)
    return lambda x, out: torch.addmm(bias, x, weight, out=out)


def _gemm_of_rows(call: OperatorCall) -> Callable[[int, int, torch.Tensor], object]:
    """Return ``f(first, last, out)``, which multiplies these rows of x by the weight, and adds the addend's."""
    pair, addend = call.fp8, None if call.addend is None else matrix(call.addend)
    if pair is not None:

        def fp8_rows(first: int, last: int, out: torch.Tensor) -> None:
            fp8_gemm(pair._replace(x=pair.x.part(first, last)), out=out)
            if addend is not None:
                out.add_(addend[first:last])

        return fp8_rows
    if addend is not None:
        weight = call.weight if call.transposed else call.weight.t()
        return lambda first, last, out: torch.addmm(addend[first:last], call.x[first:last], weight, out=out)
    gemm = _gemm(call)
    return lambda first, last, out: gemm(call.x[first:last], out)


def _why_not_captured(x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """Return why a call on ``x`` cannot be part of a CUDA graph, or None."""
    if x.device not in state_of(group).transports and torch.cuda.is_current_stream_capturing():
        return "its transport would have to be made while a CUDA graph is captured; run it once before"
    by = transport_of(group, x.device)
    return None if by.captures else f"what goes by {by.kind} cannot be captured in CUDA graphs"
