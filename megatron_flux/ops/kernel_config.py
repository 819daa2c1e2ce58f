"""The configuration of a fused kernel (tile, schedule, transport), the rule that chooses one, and the candidates.

The rules come from measurements on four H200s. Warp-specialised kernels (results/ops-h200x4-nvlink): all SMs multiply,
so what counts is the number of rounds of tiles; a tile's pieces are best sent over three quarters of the next tile's
time. In long runs the power limit counts too, and with it how much memory a round of tiles reads: 16 row blocks at a
time are up to 1.6 % faster than 8 (one H200, results/power-h200). Partial tiles for the own rank, on which no peer
waits, are best done in between: as a last round of their own they leave the link without work (two GPUs in place of
eight, results/stand-in-8-h200x2: 0.596 ms instead of 0.575 for m=8192, n=12288, k=1536; as four it is even).
Plain kernels (results/ops-h200x4-nvlink-triton): with 128 x 256 tiles the usual shapes make multiples of 128 tiles, so
four of 132 SMs are free for adding partials at no cost in rounds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field

from megatron_flux.comm.copy_engine import WHOLE, Edges
from megatron_flux.comm.slab import CALL_FLAGS, TILE_NUMBERS

if TYPE_CHECKING:
    from megatron_flux.ops.call import OperatorCall

MIN_REDUCER_SMS = 4  # SMs that add what all others multiply; fewer have not been tried
LONG = 4096  # of k, from which on they keep up with promoted FP8 products; at 3584 it is even (results/fp8-scatter)


def power_of_two(value: int) -> int:
    """Return ``value``. Raises ValueError: it is none."""
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def cdiv(a: int, b: int) -> int:
    """Return ``ceil(a / b)``; Triton's own takes 1.5 us."""
    return -(-a // b)


Tile = Annotated[int, Field(ge=16, le=256), AfterValidator(power_of_two)]
Warps = Annotated[int, Field(ge=1, le=16), AfterValidator(power_of_two)]
Depth = Annotated[int, Field(ge=1, le=16)]
Count = Annotated[int, Field(ge=1, le=1024)]
"""Limits of what is read from files: beyond them kernels do not compile, or count to nothing."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One way to run a fused call. Sizes are in elements; kernels ignore the fields of other kernels."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    bm: Tile = 128
    bn: Tile = 256
    bk: Tile = 64
    stages: Depth = 4
    warps: Warps = 8  # plain kernels
    split: bool = True  # plain kernels: store a tile as two halves, which needs half the shared memory
    group: Count = 8  # all_gather_gemm: row blocks per raster group
    span: Count = 1
    """all_gather_gemm, ``ws``: shards, after the first to come, whose row blocks are done together."""
    early: bool = False
    """all_gather_gemm, ``ws``: a quarter of the columns of the first two shards to come goes ahead."""
    late: bool = False
    """all_gather_gemm, ``ws``: a quarter of the columns of the last shard to come comes by itself."""
    band: Count = 1  # gemm_reduce_scatter: row blocks per destination and step
    reducers: Count = 4  # gemm_reduce_scatter, plain: CTAs that only add partials
    ws: bool = False  # the warp-specialised kernels (Hopper only)
    ring: Depth = 2  # ``ws``: pieces of 64 columns that wait to be stored
    spread: Annotated[int, Field(ge=0, le=100)] = 0
    """gemm_reduce_scatter, ``ws``: percent of a tile's time over which its pieces are sent."""
    dedicated_reducers: bool = False
    """gemm_reduce_scatter, ``ws``: reserve the SMs beyond :func:`workers` for adding partials."""
    teams: Annotated[int, Field(ge=1, le=2)] = 1
    """``ws``: 2 halves of a tile's rows are multiplied by 4 warps each, which need not wait for each other."""

    def edges(self, k: int) -> Edges:
        """Return what goes ahead or behind by itself of a shard with ``k`` columns."""
        columns = cdiv(cdiv(k, 4), self.bk) * self.bk
        if columns >= k or not (self.early or self.late):
            return WHOLE
        return Edges(self.early, self.late, columns)

    def label(self) -> str:
        """Return what differs from the defaults, short."""
        return " ".join(differences(self)) or "default"


def differences(config: Any) -> list[str]:
    """Return ``name=value`` of each field of a dataclass that is not its default."""
    values = ((field, getattr(config, field.name)) for field in fields(config))
    return [f"{field.name}={value}" for field, value in values if value != field.default]


SUM_BLOCKS = 4  # blocks of k that a tile multiplies while a part's sums are added
SHORT_M, SHORT_ROUNDS = 2048, 8  # rows and rounds of a gather up to which half tiles may be fastest
HALF_TILE = 0.53
"""Time of a tile of 128 columns, in times of one of 256."""


def rs_tiles(mp: int, n: int, config: KernelConfig) -> int:
    """Return the number of tiles of a rank's local shard."""
    return cdiv(mp, config.bm) * cdiv(n, config.bn)


def workers(config: KernelConfig, mp: int, n: int, tp: int, sms: int) -> int:
    """Return how many SMs multiply in a gemm_reduce_scatter."""
    return _needed(config, mp, n, tp, sms) if config.dedicated_reducers else sms


def _needed(config: KernelConfig, mp: int, n: int, tp: int, sms: int) -> int:
    """Return how many SMs a gemm_reduce_scatter needs for as few rounds of tiles; all, if too few are left to add."""
    tiles = rs_tiles(mp, n, config) * tp
    fewest = cdiv(tiles, cdiv(tiles, sms))
    return fewest if sms - fewest >= MIN_REDUCER_SMS else sms


def divided(call: OperatorCall, config: KernelConfig) -> bool:
    """Return True if the kernel may divide tiles of the last round (:mod:`megatron_flux.kernels.hopper.split_k`).

    An addend leaves no registers for the sums of parts.
    """
    plain = call.fp8 is None and call.addend is None
    return plain and config.ws and config.teams == 1 and config.bm * config.bn <= TILE_NUMBERS


def last_round(tiles: int, k_blocks: int, busy: int) -> tuple[int, int]:
    """Return the tiles of the last round that are divided along k, and in how many parts: ``(0, 1)`` if none are.

    ``busy`` SMs multiply. To add a part takes about as long as to multiply SUM_BLOCKS of a tile's ``k_blocks``: with
    k = 13824 six to eight parts were the fastest, with k = 8192 six to eight, with k = 2560 three (2 x H100,
    results/split-k-x2).
    """
    left = tiles % busy
    parts = min(busy // left, math.isqrt(k_blocks // SUM_BLOCKS)) if left else 1
    return (left, parts) if parts > 1 else (0, 1)


def in_fewest_rounds(config: KernelConfig, mp: int, n: int, tp: int, sms: int) -> KernelConfig:
    """Return a plan of gemm_reduce_scatter, or it with tiles of the other width where these take 4 % less by rounds.

    For FP8 operands whose sums are not promoted: of 3584 rows half tiles take 11 % less, where rounds say 7 (2 x H100).
    In 16 bits the last round is divided instead. Gathers are left alone: on H100 half tiles took up to 34 % more where
    rounds say 1 % less.
    """
    if not config.ws or config.bm != 128 or config.dedicated_reducers:
        return config
    other, blocks = _of_other_width(config), cdiv(mp, 128) * tp
    now, then = (_time_in_rounds(blocks, n, one.bn, sms) for one in (config, other))
    return other if then < 0.96 * now else config


def _time_in_rounds(blocks: int, n: int, bn: int, sms: int, k_blocks: int = 0) -> float:
    """Return the time of tiles of ``blocks`` of 128 rows and ``bn`` of ``n`` columns, in times of a tile of 256.

    ``k_blocks``: of operands whose last round is divided along k; 0: it is not.
    """
    tiles = blocks * cdiv(n, bn)
    _, parts = last_round(tiles, k_blocks, sms)
    saved = 1 - 1 / parts - (parts - 1) * SUM_BLOCKS / k_blocks if parts > 1 else 0.0
    return (cdiv(tiles, sms) - saved) * (1.0 if bn == 256 else HALF_TILE)


@functools.lru_cache(1024)
def _of_other_width(config: KernelConfig) -> KernelConfig:
    return replace(config, bn=128, stages=5) if config.bn == 256 else replace(config, bn=256, stages=3)


@functools.lru_cache(1024)
def for_fp8(config: KernelConfig, *, promoted: bool) -> KernelConfig:
    """Return ``config`` as FP8 operands can run it: 128 of k at a time, as many bytes as 64 of 16 bits.

    Where sums are ``promoted``, by two teams; in plain kernels, in tiles that leave registers for it.
    """
    config = replace(config, bk=min(2 * config.bk, 128))
    if not promoted:
        return config
    if not config.ws:
        return replace(config, bn=min(config.bn, 128))
    stages = config.stages if config.bn > 128 else min(config.stages, 5 if config.ring < 4 else 4)  # room for scales
    return replace(config, bk=128, bm=128, stages=stages, teams=2)


def by_rule(
    op: str, mp: int, n: int, k: int, tp: int, sms: int, ws: bool = False, promoted: bool | None = None,
    divides: bool = True,
) -> KernelConfig:  # fmt: skip
    """Choose for a call with ``mp`` rows a rank without measuring; ``ws`` as in :class:`KernelConfig`.

    ``promoted``: of FP8 operands, whether their sums are; None: 16-bit operands. ``divides``: the kernel may divide
    tiles of the last round.
    """
    like = k if promoted is None else _time_like(op, k)
    if op == "all_gather_gemm":
        k_blocks = _divided_blocks(mp, k, divides and promoted is None)
        config = _fewest_rounds(mp * tp, n, sms, k_blocks)[0] if ws else KernelConfig()
    elif ws:
        band = _wide(mp, tp) if like >= LONG else 1
        config = KernelConfig(ws=True, stages=3, ring=4, band=band, spread=0 if _link_bound(like, tp) else 75)
    else:
        config = KernelConfig(stages=3, split=False, band=max(1, 8 // tp), reducers=4 if like >= 2048 else 12)
    if promoted is None:
        return config
    config = for_fp8(config, promoted=promoted)
    long = op == "gemm_reduce_scatter" and ws and promoted and k >= LONG
    return replace(config, dedicated_reducers=True) if long and _needed(config, mp, n, tp, sms) < sms else config


def _wide(mp: int, tp: int) -> int:
    """Return the band of 16 row blocks of all destinations: a round of tiles reads about as much of x as of the weight.

    For long k a band of one took 4 to 21 % longer, at the power limit up to 16 % (2 x H100, results/split-k-x2).
    """
    return max(1, min(cdiv(mp, 128), 16 // tp))


def _link_bound(k: int, tp: int) -> bool:
    """Return True if sending a tile takes most of the time of computing it: NVLink at 350 GB/s, 700 TFLOP/s."""
    return k < 2500 * (tp - 1) / tp


def _divided_blocks(mp: int, k: int, divides: bool) -> int:
    """Return the blocks of k for :func:`_time_in_rounds`; an all_gather_gemm divides whole row blocks alone."""
    return cdiv(k, 64) if divides and mp % 128 == 0 else 0


def _fewest_rounds(m: int, n: int, sms: int, k_blocks: int) -> list[KernelConfig]:
    """Return the tile widths that may be fastest, first the one with less time in rounds.

    ``k_blocks``: as of :func:`_time_in_rounds`. Where it divides the last round, half tiles are for short calls alone:
    beyond they took longer in 19 of 21 calls, by up to 50 % (2 x H100, results/shipped-plans).
    """
    configs = [KernelConfig(ws=True, group=16), KernelConfig(ws=True, group=16, bn=128, stages=6)]
    if k_blocks and (m > SHORT_M or cdiv(m, 128) * cdiv(n, 256) > SHORT_ROUNDS * sms):
        return configs[:1]
    return sorted(
        configs, key=lambda config: _time_in_rounds(cdiv(m, 128), n, config.bn, sms, k_blocks)
    )  # the wider one if equal


def candidates(
    op: str, mp: int, n: int, k: int, tp: int, sms: int, ws: bool = False, promoted: bool | None = None,
    divides: bool = True,
) -> list[KernelConfig]:  # fmt: skip
    """Return what is worth measuring, the choice by rule first; nothing where a slab has too few flags.

    Arguments are those of :func:`by_rule`.
    """
    if promoted is not None:
        plans = _fp8_candidates(op, mp, n, k, tp, sms, ws, promoted)
    elif op == "all_gather_gemm" and ws:
        first, *others = _fewest_rounds(mp * tp, n, sms, _divided_blocks(mp, k, divides))
        plans = [first, replace(first, early=True), replace(first, late=True)]
        plans += [plan for other in others for plan in (other, replace(other, late=True))]
        # Two shards in a raster group, and a GEMM that is long beside its gather: the shards are there.
        if tp > 2 and 2 * cdiv(mp, 128) <= first.group and n >= 2048 * (tp - 1) / tp:
            plans.insert(1, replace(first, span=2))
    elif op == "all_gather_gemm":
        plans = [KernelConfig(), KernelConfig(bn=128)]  # half the tile fits GPUs with 100 KB of shared memory
    elif ws:
        first = by_rule(op, mp, n, k, tp, sms, ws)
        spreads = (0, 40) if _link_bound(k, tp) else (75, 40)
        rows, wide = cdiv(mp, 128), _wide(mp, tp)
        # Own tiles that fill the last round: nobody waits for them, and nothing is sent meanwhile.
        last = max(1, min(rows, cdiv(sms, cdiv(n, 256))))
        plans = [replace(first, band=band, spread=spread) for band in (first.band, 1, wide, last) for spread in spreads]
        plans += [
            replace(first, band=band, dedicated_reducers=True)
            for band in (1, wide)
            if _needed(first, mp, n, tp, sms) < sms
        ]
        plans.append(_of_other_width(replace(first, band=1)))
    else:
        first = by_rule(op, mp, n, k, tp, sms)
        plans = [first] + [replace(first, reducers=r) for r in (4, 12)]
    return [config for config in dict.fromkeys(plans) if fits(op, config, mp, n, k, tp)]


def _time_like(op: str, k: int) -> int:
    """Return the k of 16-bit operands whose product takes as long, beside its result's bytes, as that of FP8."""
    return k // 2 if op == "gemm_reduce_scatter" else k


def _fp8_candidates(
    op: str, mp: int, n: int, k: int, tp: int, sms: int, ws: bool, promoted: bool
) -> list[KernelConfig]:
    """Return the candidates of 16-bit operands and what was faster alone (results/fp8-gemm-h200, fp8-scatter)."""
    like = candidates(op, mp, n, _time_like(op, k), tp, sms, ws, divides=False)
    plans = [for_fp8(config, promoted=promoted) for config in like]
    if ws and plans:
        first, rows = plans[0], cdiv(mp, 128)
        if op == "all_gather_gemm":
            plans.insert(1, replace(first, stages=3, ring=4))
        elif not promoted:
            four, eight = (replace(first, band=min(rows, band), teams=2) for band in (4, 8))
            reduced = [replace(four, dedicated_reducers=True)] if _needed(first, mp, n, tp, sms) < sms else []
            plans = [first, four, *reduced, eight, *(plan for plan in plans[1:] if not plan.dedicated_reducers)]
        elif by_rule(op, mp, n, k, tp, sms, ws, promoted).dedicated_reducers:
            plans = [replace(plan, dedicated_reducers=plan.bn > 128) for plan in plans] + [replace(first, band=1)]
    return plans


def all_ranks_candidates(m: int, k: int, ws: bool = False, promoted: bool | None = None) -> list[KernelConfig]:
    """Return plans of gemm_reduce_scatter's kernel where it sends every tile to all ranks, the likeliest first.

    ``ws`` and ``promoted`` as of :func:`by_rule`.

    Every tile leaves, so pieces are spread over more or less of a tile's time (2 x H100,
    results/fine-tuning-x2/gemm-all-reduce.json): 60 percent won up to k = 7168, 40 at k = 14336. Bands of 16 row blocks
    read less memory: 1.0 to 2.2 % faster than 8 in all of eight calls (results/fine-tuning-x2/as-in-a-layer.json).
    """
    band = min(16, cdiv(m, 128))
    if ws:
        first = KernelConfig(ws=True, stages=3, ring=4, band=band, spread=60 if k <= 8192 else 40)
        plans = list(dict.fromkeys([first, replace(first, spread=80), replace(first, band=min(8, band))]))
    else:
        plans = [KernelConfig(stages=3, split=False, band=min(8, band), reducers=4 if k >= 2048 else 12)]
    return plans if promoted is None else [for_fp8(config, promoted=promoted) for config in plans]


def fits(op: str, config: KernelConfig, mp: int, n: int, k: int, tp: int) -> bool:
    """Return True if a plan may be a candidate of such a call: its fields mean something there, its flags suffice."""
    if op == "all_gather_gemm":
        crowded = config.span > 1 and (config.span >= tp or config.span * cdiv(mp, config.bm) > config.group)
        if crowded or ((config.early or config.late) and config.edges(k) == WHOLE):
            return False
    elif config.ws and config.band > cdiv(mp, config.bm):
        return False
    return _flags(op, config, mp, n, tp) <= CALL_FLAGS


def _flags(op: str, config: KernelConfig, mp: int, n: int, tp: int) -> int:
    """Return how many flags a call needs; the launch raises with more than there are."""
    if op == "gemm_reduce_scatter":  # one for each tile
        return rs_tiles(mp, n, config) * tp
    return 2 * tp  # one for each piece of a shard
