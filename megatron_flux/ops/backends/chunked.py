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
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.host_link import HostGather
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
    takes_leading_dimensions = True

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
        given, (gemm, weight) = call.x, _gemm(call)
        rows, *others = given.shape
        shape = (rows * call.group.size(), *others)
        y, full = given.new_empty(*shape[:-1], weight.shape[1]), given.new_empty(shape)
        gather = _Gathered(self, call, matrix(given), full, pieces)
        cut, places = gather.cut, gather.cut.places
        inputs, outputs = matrix(full).split_with_sizes(cut.sizes), matrix(y).split_with_sizes(cut.sizes)
        with poison_on_error(gather.link, call.operator):
            flight = gather.begin()
            gemm(gather.x, weight, out=outputs[cut.own])
            if call.return_gathered:
                gather.copy_own(full)
            for which in flight:
                at = places[which]
                if gather.encoded:
                    gather.decode(which, inputs[at])
                gemm(inputs[at], weight, out=outputs[at])
        return y, full

    def _all_gather_gemm_fp8(
        self, call: OperatorCall, pair: Fp8Pair, pieces: int | None
    ) -> tuple[torch.Tensor, Fp8Operand]:
        x, tp, rank = pair.x, call.group.size(), call.group.rank()
        scales = x.scale_inv
        y, full = x.data.new_empty(call.m, call.n, dtype=pair.out), x.data.new_empty(call.m, call.k)
        all_scales = scales.new_empty(tp, *scales.shape) if pair.blocks else scales
        gathers = [_Gathered(self, call, x.data, full, pieces)]
        if pair.blocks:  # first, on their own: 4 bytes for 128
            gathers.insert(0, _Gathered(self, call, scales, all_scales, 1))
        gather, cut = gathers[-1], gathers[-1].cut
        outputs = y.split_with_sizes(cut.sizes)
        with poison_on_error(gather.link, call.operator):
            begun = [ahead.begin() for ahead in gathers[:-1]]
            for ahead in begun:
                ahead.enqueue()
            flight = gather.begin()
            fp8_gemm(pair, call.bias, out=outputs[cut.own])
            if call.return_gathered:
                gather.copy_own(full)
            for ahead in begun:
                ahead.wait()
                all_scales[rank].copy_(scales)
            gathered = Fp8Operand(full, x.dtype, all_scales, x.scaling, tp)
            for peer, piece in flight:
                part = gathered.shard(peer).part(cut.rows[piece], cut.rows[piece + 1])
                fp8_gemm(pair._replace(x=part), call.bias, out=outputs[cut.places[peer, piece]])
        return y, gathered

    def all_gather(self, call: OperatorCall, pieces: int | None = None) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`."""
        x = call.x
        full = x.new_empty(call.gathered_shape)
        gather = _Gathered(self, call, matrix(x), full, pieces)
        with poison_on_error(gather.link, call.operator):
            flight = gather.begin()
            flight.enqueue()
            gather.copy_own(full)
        begun = _current_stream(x)

        def wait() -> None:
            with poison_on_error(gather.link, call.operator):
                flight.wait()
                if gather.encoded:
                    blocks = matrix(full).split_with_sizes(gather.cut.sizes)
                    for which, at in gather.cut.places.items():
                        gather.decode(which, blocks[at])
            _used_behind(begun, gather.arrived)

        return Pending(full, wait, keep=(x, full))

    def gemm_reduce_scatter(self, call: OperatorCall, pieces: int | None = None) -> Pending:
        """See :class:`~megatron_flux.ops.backend.Backend`. With ``async_op`` the transfers that are left when
        the GEMMs have ended run beside what comes next.
        """
        compare_calls(call)
        x, group, wire, out = matrix(call.x), call.group, self.wire, call.out
        link, state = transport_of(group, x.device), state_of(group)
        m, n, tp, rank, known = x.shape[0], call.n, link.tp, link.rank, state.kernels
        mp, at_once = m // tp, 1 if call.fp8 is None else ROWS_AT_ONCE
        cut = _cut(wire, mp, n, out.itemsize, pieces or self.pieces, at_once, tp, rank)
        gemm = _gemm_of_blocks(call, x, cut)
        # All memory before the call begins: peers would wait for one that ends in between.
        result = x.new_empty(call.result_shape, dtype=out)
        if exact := wire == wires.EXACT:
            theirs, sent = x.new_empty(tp, mp, n, dtype=out), x.new_empty(m, n, dtype=out)
            blocks = sent.split_with_sizes(cut.sizes)
            own = blocks[cut.own]
        else:
            theirs = x.new_empty(tp, cut.cuts[-1], dtype=torch.uint8)
            sent, own = torch.empty_like(theirs), x.new_empty(mp, n, dtype=out)
            partial = x.new_empty(max(b - a for a, b in itertools.pairwise(cut.rows)), n, dtype=out)

        def finish() -> None:
            exchange.wait()
            if exact:
                wires.add(wire, theirs, own, rank, result, known)
                return
            y = matrix(result)
            for (first, last), data in zip(itertools.pairwise(cut.rows), itertools.pairwise(cut.cuts), strict=True):
                wires.add(wire, theirs[:, slice(*data)], own[first:last], rank, y[first:last], known)

        with poison_on_error(link, call.operator):
            if state.table is not None:
                state.table.enter()
            exchange = link.exchange(call.operator, sent, theirs, cut.cuts)
            for which in exchange.steps:
                at = cut.places[which]
                if exact:
                    gemm(at, blocks[at])
                else:
                    peer, piece = which
                    gemm(at, part := partial[: cut.sizes[at]])
                    wires.encode(part, sent[peer, cut.cuts[piece] : cut.cuts[piece + 1]], known)
                exchange.send()
            gemm(cut.own, own)
            if not call.async_op:
                finish()
                return Pending(result)
            exchange.enqueue()
        begun = _current_stream(x)

        def wait() -> None:
            with poison_on_error(link, call.operator):
                finish()
            _used_behind(begun, theirs, sent, own)

        return Pending(result, wait, keep=(x, theirs, sent, own))


class _Gathered:
    """The gather of a matrix ``x``, with one of as many rows from every rank, but for the local shard."""

    def __init__(
        self, backend: ChunkedBackend, call: OperatorCall, x: torch.Tensor, full: torch.Tensor, pieces: int | None
    ) -> None:
        """Allocates; nothing has begun. ``x``: that of ``call``, or part of its FP8 operand, which is sent as it is."""
        compare_calls(call)
        group = call.group
        wire, at_once = (backend.wire, 1) if call.fp8 is None else (wires.EXACT, ROWS_AT_ONCE)
        self.x, self._operator, self._state = x, call.operator, state_of(group)
        self.link = link = transport_of(group, x.device)
        size = x.element_size()
        self.cut = cut = _cut(wire, *x.shape, size, pieces or backend.pieces, at_once, link.tp, link.rank)
        self.encoded = wire != wires.EXACT
        self._mine, self.arrived = x, full
        if self.encoded:
            self._mine = x.new_empty(cut.cuts[-1], dtype=torch.uint8)
            self.arrived = x.new_empty(link.tp, cut.cuts[-1], dtype=torch.uint8)

    def begin(self) -> HostGather:
        """Send what this rank has."""
        cuts, table = self.cut.cuts, self._state.table
        if self.encoded:
            for rows, data in zip(itertools.pairwise(self.cut.rows), itertools.pairwise(cuts), strict=True):
                wires.encode(self.x[slice(*rows)], self._mine[slice(*data)], self._state.kernels)
        if table is not None:
            table.enter()
        return self.link.gather(self._operator, self._mine, self.arrived, cuts)

    def decode(self, which: tuple[int, int], out: torch.Tensor) -> None:
        """Decode a ``(peer, piece)`` that has arrived."""
        peer, piece = which
        data = self.arrived[peer, self.cut.cuts[piece] : self.cut.cuts[piece + 1]]
        wires.decode(data, out, self._state.kernels)

    def copy_own(self, full: torch.Tensor) -> None:
        """Copy the local shard to its place in ``full``."""
        x, rank = self.x, self.link.rank
        if x.is_cuda:
            nbytes = x.nbytes
            stream = torch._C._cuda_getCurrentRawStream(x.get_device())
            driver.copy(full.data_ptr() + rank * nbytes, x.data_ptr(), nbytes, stream)
        else:
            full.view(self.link.tp, *x.shape)[rank].copy_(x)


class _Cut(NamedTuple):
    """How the shards of all ranks are cut: those of peers into pieces, the local one not at all."""

    rows: list[int]  # where a shard's pieces begin, and its rows
    cuts: tuple[int, ...]  # the same in bytes on the wire, where each piece is encoded by itself
    sizes: list[int]  # rows of all blocks, in the order of ranks
    places: dict[tuple[int, int], int]  # of a ``(peer, piece)`` among these
    own: int  # of the local shard


@functools.lru_cache(maxsize=1024)
def _cut(wire: str, rows: int, width: int, itemsize: int, pieces: int | None, at_once: int, tp: int, rank: int) -> _Cut:
    """Cut shards of ``rows`` x ``width``; pieces begin at multiples of ``at_once`` rows."""
    blocks = -(-rows // at_once)
    count = max(1, min(pieces, blocks)) if pieces else min(pieces_of(rows, width * itemsize), blocks)
    by_rows = [min(rows, blocks * piece // count * at_once) for piece in range(count + 1)]
    of_pieces = [last - first for first, last in itertools.pairwise(by_rows)]
    cuts = itertools.accumulate((wires.nbytes(wire, some, width, itemsize) for some in of_pieces), initial=0)
    sizes: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for peer in range(tp):
        if peer == rank:
            own = len(sizes)
            sizes.append(rows)
            continue
        for piece, some in enumerate(of_pieces):
            places[peer, piece] = len(sizes)
            sizes.append(some)
    return _Cut(by_rows, tuple(cuts), sizes, places, own)


def _current_stream(x: torch.Tensor) -> int | None:
    """Return the handle of the current stream of x's GPU."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None


def _used_behind(begun: int | None, *parts: torch.Tensor) -> None:
    """Call ``record_stream`` on ``parts``, allocated on the stream ``begun`` (a handle), if the current stream is
    another one. ``begun`` does not wait for that stream, so the allocator must.
    """
    if begun is not None and _current_stream(parts[0]) != begun:
        for part in parts:
            part.record_stream(torch.cuda.current_stream(part.device))


def _gemm(call: OperatorCall) -> tuple[Callable[..., object], torch.Tensor]:
    """Return ``f`` and the weight: ``f(x, weight, out=y)`` multiplies rows, and adds the bias where there is one."""
    weight = call.weight if call.transposed else call.weight.t()  # type: ignore[union-attr]
    return (torch.mm if call.bias is None else functools.partial(torch.addmm, call.bias)), weight


def _gemm_of_blocks(call: OperatorCall, x: torch.Tensor, cut: _Cut) -> Callable[[int, torch.Tensor], object]:
    """Return ``f(at, out)``, which multiplies that block of the matrix x by the weight, and adds the addend's."""
    pair = call.fp8
    addends = () if call.addend is None else matrix(call.addend).split_with_sizes(cut.sizes)
    if pair is not None:
        ends = [*itertools.accumulate(cut.sizes, initial=0)]

        def fp8_block(at: int, out: torch.Tensor) -> None:
            fp8_gemm(pair._replace(x=pair.x.part(ends[at], ends[at + 1])), out=out)
            if addends:
                out.add_(addends[at])

        return fp8_block
    blocks, (gemm, weight) = x.split_with_sizes(cut.sizes), _gemm(call)
    if addends:
        return lambda at, out: torch.addmm(addends[at], blocks[at], weight, out=out)
    return lambda at, out: gemm(blocks[at], weight, out=out)


def _why_not_captured(x: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    """Return why a call on ``x`` cannot be part of a CUDA graph, or None."""
    if x.device not in state_of(group).transports and torch.cuda.is_current_stream_capturing():
        return "its transport would have to be made while a CUDA graph is captured; run it once before"
    by = transport_of(group, x.device)
    return None if by.captures else f"what goes by {by.kind} cannot be captured in CUDA graphs"
