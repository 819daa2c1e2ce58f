"""The configuration of a gemm_all_reduce: shots and blocks, or a built-in GEMM for few rows or for many.

Few rows (decode): the GEMM reads the weight once, and what its result costs to add up is latency. ``own_gemm`` does
both in one kernel: every CTA sends its tile when it is finished and adds what its peers sent, so that the link's
latency is met once and no second kernel starts. Otherwise cuBLAS multiplies, and a small kernel adds in one or two
shots (:mod:`megatron_flux.kernels.all_reduce`): two cost one way more and ``tp / 2`` times fewer bytes.

Many rows (prefill, training): ``tiles`` is the kernel of gemm_reduce_scatter, which sends every tile to all ranks when
it is finished and adds behind the GEMM. At tp 2 that is as many bytes as an all-reduce, at tp 4 and 8 two and four
times as many.

Measured (2 x H100, results/fine-tuning-x2/gemm-all-reduce.json): tiles hide 59 % (m=4096, n=4096, k=2048) to 93 %
(m=4096, n=8192, k=14336) of what stock's all-reduce takes behind its GEMM.

Which is faster from which m on, the tuner measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field

from megatron_flux.ops.kernel_config import (
    Count,
    Depth,
    KernelConfig,
    Tile,
    Warps,
    all_ranks_candidates,
    cdiv,
    differences,
    fits,
    power_of_two,
)

ALIGNED = 64  # numbers: slots begin at multiples of 128 bytes or more
MOST_BYTES = 16 << 20
"""Largest result that is added in shots. Beyond it tiles are faster, since two shots hide none of their bytes."""
FEW_BYTES = 1 << 20
"""Largest result of many rows whose sum is latency alone (an adapter's 8 to 64 columns): one shot saves one way."""
MOST_ROWS_OF_OWN_GEMM = 64
LEAST_ROWS_BY_TILES = 128


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """One way to run a call. Kernels ignore the fields of other kernels."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    tiles: KernelConfig | None = None
    """One shot by the kernel of gemm_reduce_scatter; the other fields mean nothing then."""
    shots: Annotated[int, Field(ge=1, le=2)] = 1
    own_gemm: bool = False  # one shot: the kernel multiplies itself
    block: Annotated[int, Field(ge=32, le=1 << 16), AfterValidator(power_of_two)] = 1024
    """Without own_gemm: numbers that a CTA sends, or adds, at a time."""
    ctas: Count = 32  # without own_gemm
    warps: Warps = 4
    bm: Tile = 16  # own_gemm
    bn: Tile = 64  # own_gemm
    bk: Tile = 128  # own_gemm
    stages: Depth = 5  # own_gemm

    def label(self) -> str:
        """Return what differs from the defaults, short."""
        if self.tiles is not None:
            return f"tiles {self.tiles.label()}"
        kind = {1: "one shot", 2: "two shots"}[self.shots]
        return " ".join([kind, *(found for found in differences(self) if not found.startswith("shots="))])

    @property
    def rows_at_a_time(self) -> int:
        """Rows of a tile that are added at a time: as many numbers as keep registers free."""
        return min(self.bm, max(1, 2048 // self.bn))

    def own_tiles(self, m: int, n: int) -> int:
        """Return the number of tiles of the own GEMM."""
        return cdiv(m, self.bm) * cdiv(n, self.bn)

    def stride(self, m: int, n: int, tp: int) -> int:
        """Return the numbers between two ranks' slots in a slab. Without ``own_gemm`` m is the count of numbers."""
        if self.own_gemm:
            return self.own_tiles(m, n) * self.bm * self.bn
        each = m if self.shots == 1 else cdiv(m, tp)
        return cdiv(each, ALIGNED) * ALIGNED

    def nbytes(self, m: int, n: int, tp: int, size: int) -> int:
        """Return the bytes that a call uses in a slab's half; ``size``: bytes of a number."""
        slots = tp * (2 if self.shots == 2 else 1)
        return slots * size * (self.stride(m, n, tp) if self.own_gemm else self.stride(m * n, 0, tp))

    def fits(self, m: int, n: int, tp: int, size: int) -> bool:
        """Return True if such a call can run so; the same on all ranks."""
        if self.tiles is not None:
            return fits("gemm_reduce_scatter", self.tiles, m, n, 0, tp)
        if m * n * size > MOST_BYTES:
            return False
        if self.own_gemm:
            return m <= MOST_ROWS_OF_OWN_GEMM
        return self.shots == 1 or m * n > (tp - 1) * self.stride(m * n, 0, tp)


def candidates(
    m: int, n: int, k: int, tp: int, size: int, ws: bool = False, promoted: bool | None = None
) -> list[AllReduceConfig]:
    """Return what is worth measuring, the likeliest first, which is the choice by rule; one shot in blocks, which runs
    all, if nothing else fits.

    One of the shots won each of 20 calls of Llama-70B's decode steps (results/inference-h200x2).

    ``size``: bytes of a number of the result. ``ws`` and ``promoted`` as of
    :func:`~megatron_flux.ops.kernel_config.by_rule`; the built-in GEMM takes no FP8 operands.
    """
    plans = [AllReduceConfig(shots=2, block=2048, ctas=128, warps=8)]
    if m <= MOST_ROWS_OF_OWN_GEMM and promoted is None:
        plans.insert(0, AllReduceConfig(own_gemm=True, bm=16 if m <= 16 else 32 if m <= 32 else 64))
    by_tiles = [AllReduceConfig(tiles=config) for config in all_ranks_candidates(m, k, ws, promoted)]
    if m >= LEAST_ROWS_BY_TILES:
        if m * n * size <= FEW_BYTES:
            plans.append(AllReduceConfig(block=2048, ctas=64, warps=8))
        plans += by_tiles
    fitting = [config for config in plans if config.fits(m, n, tp, size)]
    one_shot, tiled = AllReduceConfig(), by_tiles[0]
    return fitting or [tiled if tiled.fits(m, n, tp, size) and not one_shot.fits(m, n, tp, size) else one_shot]
