"""The ``chunked`` backends: cuBLAS multiplies what has arrived while the rest is on its way, over any transport.

For groups without NVLink. Shards are moved in pieces by a transport (:mod:`megatron_flux.comm.transport`): through host
memory on one host, by send and receive between several. ``all_gather_gemm`` multiplies the rank's own rows first, then
each piece of each peer as it arrives; ``gemm_reduce_scatter`` multiplies peers' rows first and sends each piece as soon
as it is there, its own rows last, and then adds all in fp32, in the order of ranks: results are the same in every run.

==================  =====================================================================================
name                what travels (:mod:`megatron_flux.kernels.wire`)
==================  =====================================================================================
``chunked``         the numbers as they are: gathered inputs are bit-equal
``chunked_fp8``     e4m3 in blocks of 128 with a scale: half the bytes of bf16
``chunked_int8``    int8, likewise
==================  =====================================================================================

Each rank's own rows are never quantised: they do not travel. With an 8-bit wire the gathered inputs of two ranks
therefore differ in the rows of these two.

Contract: that of :mod:`megatron_flux.ops.backends.registry`. Results, and gathered inputs, are fresh tensors.
Limits: not inside CUDA graphs; fp8 needs compute capability 8.9 on GPUs.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist

from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.transport import unbroken
from megatron_flux.comm.transports import transport_of
from megatron_flux.errors import UserError
from megatron_flux.kernels import wire as wires
from megatron_flux.kernels.wire_format import FP8_CAPABILITY
from megatron_flux.ops.checks import OperatorCall, compare_calls

PIECE_BYTES = 12 << 20
"""A shard is cut into pieces of about this size: smaller ones hide more, and make GEMMs of fewer rows."""
MOST_PIECES, LEAST_ROWS = 4, 256


def cuts_of(rows: int, width: int, most: int = MOST_PIECES) -> list[int]:
    """Where the pieces of a shard of ``rows`` of ``width`` bytes begin, in rows, and ``rows``."""
    pieces = max(1, min(most, rows * width // PIECE_BYTES, rows // LEAST_ROWS))
    return [rows * piece // pieces for piece in range(pieces + 1)]


class ChunkedBackend:
    """See the module."""

    automatic = False  # the tuner takes it, where there is no NVLink, if it is the fastest
    needs_cuda = False

    def __init__(self, name: str = "chunked", wire: str = wires.EXACT) -> None:
        """``wire``: one of :data:`megatron_flux.settings.WIRES`."""
        self.name, self.wire = name, wire
        self.pieces: int | None = None
        """Pieces of a shard; None chooses by size. For tests."""

    def why_not(self, x: torch.Tensor, weight: torch.Tensor | None, group: dist.ProcessGroup) -> str | None:
        """None, or the first limit these operands meet."""
        if x.is_cuda and self.wire == wires.FP8 and (found := _capability(x.device)) < FP8_CAPABILITY:
            return (
                f"an fp8 wire needs compute capability 8.9, this GPU has {found[0]}.{found[1]}; chunked_int8 does not"
            )
        return None

    def all_gather_gemm(self, call: OperatorCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~megatron_flux.ops.backends.registry.Backend`."""
        (mp, k), x = call.x.shape, call.x
        y, full = x.new_empty(call.m, call.n), x.new_empty(call.m, k)
        own = call.group.rank() * mp
        gather = _Gathered(self, call, full)
        with unbroken(gather.transport, call.operator):
            gather.begin()
            _gemm(call, x, y[own : own + mp])
            if call.return_gathered:
                full[own : own + mp].copy_(x)
            for peer, piece in gather.flight:
                rows = gather.decoded(peer, piece)
                _gemm(call, full[rows], y[rows])
        return y, full

    def all_gather(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backends.registry.Backend`."""
        (mp, k), x = call.x.shape, call.x
        full = x.new_empty(call.m, k)
        own = call.group.rank() * mp
        gather = _Gathered(self, call, full)
        with unbroken(gather.transport, call.operator):
            gather.begin()
            gather.flight.enqueue()
            full[own : own + mp].copy_(x)

        def wait() -> None:
            with unbroken(gather.transport, call.operator):
                gather.flight.wait()
                gather.decode_all()

        return Pending(full, wait, keep=(x, full))

    def gemm_reduce_scatter(self, call: OperatorCall) -> Pending:
        """See :class:`~megatron_flux.ops.backends.registry.Backend`. Always finished: all is enqueued."""
        _checked(call)
        x, n, group, wire = call.x, call.n, call.group, self.wire
        tp, rank = group.size(), group.rank()
        mp, size = call.m // tp, x.element_size()
        rows = self._cuts(mp, n * size)
        cuts = _bytes(wire, rows, n, size)
        transport, known = transport_of(group, x.device), _kernels(group)
        # All memory before the call begins: peers would wait for one that ends in between.
        theirs = x.new_empty(tp, cuts[-1], dtype=torch.uint8)
        sent = x.new_empty(tp, cuts[-1], dtype=torch.uint8)
        y, own = x.new_empty(mp, n), x.new_empty(mp, n)
        partial = None if wire == wires.EXACT else x.new_empty(max(b - a for a, b in itertools.pairwise(rows)), n)
        with unbroken(transport, call.operator):
            exchange = transport.exchange(call.operator, theirs, cuts)
            for peer, piece in exchange.steps:
                first, last = rows[piece], rows[piece + 1]
                block = sent[peer, cuts[piece] : cuts[piece + 1]]
                part = block.view(x.dtype).view(-1, n) if partial is None else partial[: last - first]
                _gemm(call, x[peer * mp + first : peer * mp + last], part)
                if partial is not None:
                    wires.encode(wire, part, block, known)
                exchange.send(block)
            _gemm(call, x[rank * mp : (rank + 1) * mp], own)
            exchange.wait()
            if wire == wires.EXACT:
                wires.add(wire, theirs, own, rank, y, known)
            else:
                for (first, last), data in zip(itertools.pairwise(rows), itertools.pairwise(cuts), strict=True):
                    wires.add(wire, theirs[:, slice(*data)], own[first:last], rank, y[first:last], known)
        return Pending(y)

    def _cuts(self, rows: int, width: int) -> list[int]:
        if self.pieces is None:
            return cuts_of(rows, width)
        count = max(1, min(self.pieces, rows))
        return [rows * piece // count for piece in range(count + 1)]


class _Gathered:
    """The gather of a call into ``full`` ``[m, k]``, but for the rank's own rows."""

    def __init__(self, backend: ChunkedBackend, call: OperatorCall, full: torch.Tensor) -> None:
        """Allocates; nothing has begun."""
        _checked(call)
        x, self._call, self._wire, self._full = call.x, call, backend.wire, full
        (self._mp, k), size, tp = x.shape, x.element_size(), call.group.size()
        self._rows = backend._cuts(self._mp, k * size)
        self._cuts = _bytes(self._wire, self._rows, k, size)
        self.transport, self._known = transport_of(call.group, x.device), _kernels(call.group)
        exact = self._wire == wires.EXACT
        self._theirs = (
            full.view(tp, -1).view(torch.uint8) if exact else x.new_empty(tp, self._cuts[-1], dtype=torch.uint8)
        )
        self._mine = x.view(-1).view(torch.uint8) if exact else x.new_empty(self._cuts[-1], dtype=torch.uint8)

    def begin(self) -> None:
        """Send what this rank has."""
        if self._wire != wires.EXACT:
            for piece in range(len(self._rows) - 1):
                part = self._call.x[self._rows[piece] : self._rows[piece + 1]]
                wires.encode(self._wire, part, self._mine[self._cuts[piece] : self._cuts[piece + 1]], self._known)
        self.flight = self.transport.gather(self._call.operator, self._mine, self._theirs, self._cuts)

    def decoded(self, peer: int, piece: int) -> slice:
        """The rows of ``full`` that have arrived."""
        rows = slice(peer * self._mp + self._rows[piece], peer * self._mp + self._rows[piece + 1])
        if self._wire != wires.EXACT:
            data = self._theirs[peer, self._cuts[piece] : self._cuts[piece + 1]]
            wires.decode(self._wire, data, self._full[rows], self._known)
        return rows

    def decode_all(self) -> None:
        """All rows, when all have arrived."""
        group = self._call.group
        for peer in range(group.size()):
            for piece in range(len(self._rows) - 1) if peer != group.rank() else ():
                self.decoded(peer, piece)


def _bytes(wire: str, rows: list[int], k: int, itemsize: int) -> list[int]:
    """Where pieces begin on the wire: each is encoded by itself."""
    cuts = [0]
    for first, last in itertools.pairwise(rows):
        cuts.append(cuts[-1] + wires.nbytes(wire, last - first, k, itemsize))
    return cuts


def _gemm(call: OperatorCall, x: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of x times the weight, into ``out``; with the bias inside where the call has one."""
    weight = call.weight if call.transposed else call.weight.t()  # type: ignore[union-attr]
    if call.bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(call.bias, x, weight, out=out)


def _checked(call: OperatorCall) -> None:
    """All ranks make this call, and nothing captures it."""
    if call.x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UserError(
            "backend 'chunked' cannot be captured in a CUDA graph; use backend='auto' to let flux choose, or another"
        )
    compare_calls(call)


def _kernels(group: dist.ProcessGroup) -> dict[Any, Any]:
    """Launches of the wire's kernels."""
    return state_of(group).wire_kernels


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
