"""Copies that the copy engine is given, as addresses: what a call that is made again needs of them. No triton."""

from __future__ import annotations

from typing import NamedTuple

from megatron_flux import cuda_driver as driver
from megatron_flux.ops.kernel_config import Edges


class Copy(NamedTuple):
    """A block of x for a peer, in bytes: ``rows`` of ``width`` that begin ``pitch`` apart on both sides."""

    target: int
    offset: int
    """In x."""
    width: int
    rows: int
    pitch: int
    flag: int
    """The peer's word that says it has arrived."""


def enqueue(copies: list[Copy], source: int, epoch: int, stream: int) -> None:
    """Put the copies of x, which lies at ``source``, into ``stream``, and behind each the epoch into its flag."""
    for target, offset, width, rows, pitch, flag in copies:
        if width == pitch:
            driver.copy(target, source + offset, width * rows, stream)
        else:
            driver.copy_rows(target, source + offset, width, rows, pitch, stream)
        driver.copy(flag, epoch, 4, stream)


def order(tp: int, k: int, edges: Edges) -> list[tuple[int, int, slice]]:
    """What a rank sends in which order: ``(step, piece, columns)``; step ``d`` goes to rank ``r - d``.

    Tiles of the kernel's first round belong to the first two shards to come and begin at the same time: with ``early``
    the first columns of both go ahead. What is left to multiply when the last copy has arrived cannot be hidden: with
    ``late`` that is a quarter of the columns. Each piece costs 6 us of the copy engine's time beside its bytes
    (2 x H200, results/stand-in-8-h200x2), so nothing else is cut.
    """
    small = edges.columns
    last = (k - 1) // small * small if small else 0
    whole = [(slice(0, k),)] * tp
    if edges.early:
        whole[1:3] = [(slice(0, small), slice(small, k))] * len(whole[1:3])
    if edges.late and (tp > 3 or not edges.early):
        whole[tp - 1] = (slice(0, last), slice(last, k))
    first = range(1, min(3, tp))
    turns = [(step, piece) for piece in range(2) for step in first if piece < len(whole[step])]
    turns += [(step, piece) for step in range(3, tp) for piece in range(len(whole[step]))]
    return [(step, piece, whole[step][piece]) for step, piece in turns]
