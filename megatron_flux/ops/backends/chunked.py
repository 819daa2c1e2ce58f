"""The ``chunked`` backends: cuBLAS multiplies what has arrived while the rest is on its way, over any transport.

For groups without NVLink. A transport moves shards in pieces (:mod:`megatron_flux.comm.transports`).
``all_gather_gemm`` multiplies the local shard first, then each piece of each peer as it arrives;
``gemm_reduce_scatter`` multiplies peers' rows first and sends each piece as soon as it is there, the local shard last,
and then adds all in fp32, in a fixed order: results are the same in every run.

==================  =====================================================================================
name                what travels (:mod:`megatron_flux.kernels.wire`)
==================  =====================================================================================
``chunked``         the numbers as they are: gathered inputs are bit-equal
``chunked_int8``    integers of 8 bits in rotated blocks of 128 with a scale: half the bytes of bf16
==================  =====================================================================================

FP8 operands are gathered as they are by both, their bytes in pieces and the scales of their blocks before them; what a
reduce-scatter sends of them are partial sums in bf16. The local shard is not sent, so never quantised: with an 8-bit
wire the gathered inputs of two ranks differ in the rows of these two.

Contract: that of :mod:`megatron_flux.ops.call`. Results, and gathered inputs, are fresh tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_flux import cuda_driver as driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.host_link import HostCall
from megatron_flux.comm.transports import transport_of
from megatron_flux.kernels import wire as wires
from megatron_flux.ops.backend import Backend, Plan
from megatron_flux.ops.call import OperatorCall, compare_calls, matrix
from megatron_flux.ops.cuda_graphs import capturing
from megatron_flux.ops.fp8_operand import Fp8Operand
from megatron_flux.ops.gemm import fp8_gemm
from megatron_flux.ops.recordings import REPLAY_MS, Recordings, Work, run, start

PIECE_BYTES = 12 << 20
"""A shard is cut into pieces of about this size unless the tuner knows better: smaller ones hide more, make GEMMs of
fewer rows and take more host time."""
MOST_PIECES, LEAST_ROWS = 4, 256
ROWS_AT_ONCE = 16
"""A piece of an FP8 operand has a multiple of these rows: cuBLASLt takes scales of blocks by four rows."""
COUNTS, LEAST_BYTES = (2, 4, 8, 16), 1 << 20
"""Numbers of pieces that the tuner tries, and the smallest piece."""


def piece_counts(call: OperatorCall) -> list[int]:
    """Return the possible numbers of pieces for a shard of ``call``."""
    scatters = call.operator == "gemm_reduce_scatter"
    rows, width = call.m // call.group.size(), call.n if scatters else call.k
    size = call.out.itemsize if scatters else call.x.element_size()
    most = min(rows * width * size // LEAST_BYTES, 2 * rows // LEAST_ROWS)
    return [count for count in COUNTS if count <= most] or [1]


class ChunkedPlan(Plan):
    """Calls of one spec. Where their addresses come again they are replayed (:mod:`megatron_flux.ops.recordings`)."""

    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        self.backend, self._pieces, self.nbytes = backend, pieces, backend.bytes_received(call)
        self.recordings = Recordings() if call.x.is_cuda and not call.captured else None
        if self.recordings is not None and transport_of(call.group, call.x.device).captures:
            self.replay_ms = REPLAY_MS

    def run(self, call: OperatorCall) -> Any:
        """See the base class. What an asynchronous call's GEMMs leave to transfer runs beside what comes next."""
        if torch.is_inference_mode_enabled():  # what is made may outlive it, and be written to by a training
            with torch.inference_mode(False), torch.no_grad():
                return self.run(call)
        if not call.x.is_contiguous():
            call = call._replace(x=call.x.contiguous())
        if call.operator == "all_gather_gemm":
            kind = _GatherGemm if call.fp8 is None else _GatherGemmFp8
            multiplied = run(kind(self.backend, call, self._pieces), self.recordings)
            return multiplied.y, multiplied.gathered
        work = (_Gather if call.operator == "all_gather" else _GemmScatter)(self.backend, call, self._pieces)
        if call.operator == "all_gather" or call.async_op:
            return Pending(work.result, start(work, self.recordings), keep=(call.x,))
        return run(work, self.recordings).result


class ChunkedBackend(Backend):
    """See the module."""

    operators = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather")

    def __init__(self, name: str = "chunked", wire: str = wires.EXACT) -> None:
        self.name, self.wire = name, wire
        self.pieces: int | None = None
        """Pieces of a shard; None chooses by size. For tests."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """Return the first limit that these operands meet, or None."""
        if not x.is_cuda or not capturing(x):
            return None
        if x.device not in state_of(group).transports and torch.cuda.is_current_stream_capturing():
            return "its transport would have to be made while a CUDA graph is captured; run it once before"
        by = transport_of(group, x.device)
        return None if by.captures else f"what goes by {by.kind} cannot be captured in CUDA graphs"

    def plan(self, call: OperatorCall, pieces: int | None = None) -> Plan:
        """See the base class; ``pieces`` of a shard, None: by its size."""
        return ChunkedPlan(self, call, pieces)

    def bytes_received(self, call: OperatorCall) -> int:
        """Return the bytes that a rank receives for ``call``: 8-bit wire formats send fewer."""
        scatters = call.operator == "gemm_reduce_scatter"
        if self.wire == wires.EXACT or (call.fp8 is not None and not scatters):
            return call.bytes_received
        peers, rows = call.group.size() - 1, call.m // call.group.size()
        return peers * wires.nbytes(self.wire, rows, call.n if scatters else call.k, call.out.itemsize)


class _Chunked(Work):
    """A call of this backend."""

    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        compare_calls(call)
        super().__init__(call, transport_of(call.group, call.x.device))
        self.wire, self.pieces = backend.wire, pieces or backend.pieces

    def cut(self, width: int, size: int) -> _Cut:
        """Cut the shards, of ``width`` numbers of ``size`` bytes a row."""
        call, tp, rank = self.call, self.link.tp, self.link.rank
        at_once = 1 if call.fp8 is None else ROWS_AT_ONCE
        return _cut(self.wire, call.m // tp, width, size, self.pieces, at_once, tp, rank)


class _Gathering(_Chunked):
    """Gathers the rows of x, but for the local shard, which is copied where somebody reads it."""

    gathered: Any

    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        super().__init__(backend, call, pieces)
        if call.fp8 is not None:
            self.wire = wires.EXACT
        self.encoded = self.wire != wires.EXACT
        self.full = self.empty(call.gathered_shape)
        self._sent, self._arrives = self.x, self.full
        if self.encoded:
            nbytes = self.cut(call.k, self.x.element_size()).cuts[-1]
            self._sent = self.empty((nbytes,), torch.uint8)
            self._arrives = self.empty((self.link.tp, nbytes), torch.uint8)

    def begin_gather(self) -> tuple[_Cut, HostCall]:
        """Send what this rank has."""
        self._cut = cut = self.cut(self.call.k, self.x.element_size())
        if self.encoded:
            for rows, data in zip(itertools.pairwise(cut.rows), itertools.pairwise(cut.cuts), strict=True):
                wires.encode(self.x[slice(*rows)], self._sent[slice(*data)], self.state.kernels)
        return cut, self.link.gather(self.call.operator, self._sent, self._arrives, cut.cuts)

    def decode(self, which: tuple[int, int], out: torch.Tensor) -> None:
        """Decode a ``(peer, piece)`` that has arrived."""
        peer, piece = which
        data = self._arrives[peer, self._cut.cuts[piece] : self._cut.cuts[piece + 1]]
        wires.decode(data, out, self.state.kernels)

    def copy_own(self) -> None:
        """Copy the local shard to its place in the gathered x."""
        x, rank = self.x, self.link.rank
        if x.is_cuda:
            nbytes = x.nbytes
            stream = torch._C._cuda_getCurrentRawStream(x.get_device())
            driver.copy(self.full.data_ptr() + rank * nbytes, x.data_ptr(), nbytes, stream)
        else:
            self.full.view(self.link.tp, *x.shape)[rank].copy_(x)


class _Gather(_Gathering):
    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        super().__init__(backend, call, pieces)
        self.result = self.full

    def begin(self) -> None:
        _, self._flight = self.begin_gather()
        self._flight.enqueue()
        self.copy_own()

    def finish(self) -> None:
        self._flight.wait()
        if self.encoded:
            blocks = matrix(self.full).split_with_sizes(self._cut.sizes)
            for which, at in self._cut.places.items():
                self.decode(which, blocks[at])


class _GatherGemm(_Gathering):
    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        super().__init__(backend, call, pieces)
        self.y, self.gathered = self.empty(call.result_shape), self.full

    def begin(self) -> None:
        gemm, weight = _gemm(self.call)
        cut, flight = self.begin_gather()
        inputs, outputs = matrix(self.full).split_with_sizes(cut.sizes), matrix(self.y).split_with_sizes(cut.sizes)
        gemm(self.x, weight, out=outputs[cut.own])
        if self.call.return_gathered:
            self.copy_own()
        for which in flight:
            at = cut.places[which]
            if self.encoded:
                self.decode(which, inputs[at])
            gemm(inputs[at], weight, out=outputs[at])


class _GatherGemmFp8(_Gathering):
    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        super().__init__(backend, call, pieces)
        assert call.fp8 is not None  # noqa: S101 - the caller has looked
        self.pair, x, tp = call.fp8, call.fp8.x, self.link.tp
        self.y = self.empty((call.m, call.n), self.pair.out)
        scales = self.empty((tp, *x.scale_inv.shape), torch.float32) if self.pair.blocks else x.scale_inv
        self.gathered = Fp8Operand(self.full, x.dtype, scales, x.scaling, tp)

    def begin(self) -> None:
        pair, gathered, bias, ahead = self.pair, self.gathered, self.call.bias, None
        scales, every = pair.x.scale_inv, gathered.scale_inv
        if pair.blocks:  # first, on their own: 4 bytes for 128
            ahead = self.link.gather(self.call.operator, scales, every, (0, scales.nbytes))
            ahead.enqueue()
        cut, flight = self.begin_gather()
        outputs = self.y.split_with_sizes(cut.sizes)
        fp8_gemm(pair, bias, out=outputs[cut.own])
        if self.call.return_gathered:
            self.copy_own()
        if ahead is not None:
            ahead.wait()
            every[self.link.rank].copy_(scales)
        for peer, piece in flight:
            part = gathered.shard(peer).part(cut.rows[piece], cut.rows[piece + 1])
            fp8_gemm(pair._replace(x=part), bias, out=outputs[cut.places[peer, piece]])


class _GemmScatter(_Chunked):
    def __init__(self, backend: ChunkedBackend, call: OperatorCall, pieces: int | None) -> None:
        super().__init__(backend, call, pieces)
        (m, n, _), out, tp = call.sizes, call.out, self.link.tp
        self.result, self.exact = self.empty(call.result_shape, out), self.wire == wires.EXACT
        if self.exact:
            self.theirs, self.sent = self.empty((tp, m // tp, n), out), self.empty((m, n), out)
            return
        cut = self.cut(n, out.itemsize)
        self.theirs, self.sent = (self.empty((tp, cut.cuts[-1]), torch.uint8) for _ in range(2))
        self.own = self.empty((m // tp, n), out)
        self.partial = self.empty((max(b - a for a, b in itertools.pairwise(cut.rows)), n), out)

    def begin(self) -> None:
        call, sent = self.call, self.sent
        self._cut = cut = self.cut(call.n, call.out.itemsize)
        gemm = _gemm_of_blocks(call, self.x, cut)
        if self.exact:
            blocks = sent.split_with_sizes(cut.sizes)
            self.own = blocks[cut.own]
        self._exchange = exchange = self.link.exchange(call.operator, sent, self.theirs, cut.cuts)
        for which in exchange.steps:
            at = cut.places[which]
            if self.exact:
                gemm(at, blocks[at])
            else:
                peer, piece = which
                gemm(at, part := self.partial[: cut.sizes[at]])
                wires.encode(part, sent[peer, cut.cuts[piece] : cut.cuts[piece + 1]], self.state.kernels)
            exchange.send()
        gemm(cut.own, self.own)
        if call.async_op:
            exchange.enqueue()

    def finish(self) -> None:
        self._exchange.wait()
        wire, own, rank, known = self.wire, self.own, self.link.rank, self.state.kernels
        if self.exact:
            wires.add(wire, self.theirs, own, rank, self.result, known)
            return
        cut, y = self._cut, matrix(self.result)
        for (first, last), data in zip(itertools.pairwise(cut.rows), itertools.pairwise(cut.cuts), strict=True):
            wires.add(wire, self.theirs[:, slice(*data)], own[first:last], rank, y[first:last], known)


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
    wanted = pieces or min(MOST_PIECES, rows * width * itemsize // PIECE_BYTES, rows // LEAST_ROWS)
    count = max(1, min(wanted, blocks))
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
