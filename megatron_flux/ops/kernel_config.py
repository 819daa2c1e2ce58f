"""What a fused call can choose: tile, schedule and transport, and the choice without a tuner.

The rules come from measurements on four H200s. Warp-specialised kernels (results/ops-h200x4-nvlink): all SMs multiply,
so what counts is the number of rounds of tiles; a tile's pieces are best sent over three quarters of the next tile's
time. Lastingly the power limit counts too, and with it how much memory a round of tiles reads: 16 row blocks at a time
are up to 1.6 % faster than 8 (one H200, results/power-h200). Partial tiles for the own rank, on which no peer waits,
are best done in between: kept for the end, as one round of their own, they leave the link without work (two GPUs that
stand in for eight, results/stand-in-8-h200x2: 0.596 ms instead of 0.575 for m=8192, n=12288, k=1536, 0.455 instead of
0.445 for m=2048, k=6144; as four it is even).
Plain kernels (results/ops-h200x4-nvlink-triton): with 128 x 256 tiles the usual shapes make multiples of 128 tiles, so
four of 132 SMs are free for moving or adding data at no cost in rounds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from megatron_flux.comm.slab import CALL_FLAGS


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own takes 1.5 us."""
    return -(-a // b)


class Edges(NamedTuple):
    """Shards that the copy engine sends in two pieces of columns, each with a flag: :attr:`KernelConfig.early`."""

    early: bool = False
    late: bool = False
    columns: int = 0
    """Of the smaller piece and, in whole numbers, of the other; the last of them may be cut short by k."""

    @property
    def flags(self) -> int:
        """Flags of a shard."""
        return 2 if self.early or self.late else 1


WHOLE = Edges()


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """One way to run a fused call. Sizes are in elements."""

    bm: int = 128
    bn: int = 256
    bk: int = 64
    stages: int = 4
    warps: int = 8
    split: bool = True
    """Store a tile as two halves: needs half the shared memory."""
    group: int = 8
    """all_gather_gemm: row blocks per raster group."""
    span: int = 1
    """all_gather_gemm by copy engine, ``ws``: shards, after the first to come, whose row blocks are done together."""
    comm: int = 0
    """all_gather_gemm: CTAs that push; 0 is the copy engine."""
    skip: int = 0
    """all_gather_gemm: rounds of tiles that pushing CTAs sit out; -1 is all."""
    pace: bool = False
    """all_gather_gemm by copy engine: one writer per receiver, enforced."""
    block: int = 0
    """all_gather_gemm: rows that travel together; 0 is a shard."""
    chunks: int = 1
    """all_gather_gemm: chunks of columns of a block, each with its own flag."""
    early: bool = False
    """all_gather_gemm by copy engine, ``ws``: a quarter of the columns of the first two shards to come goes ahead."""
    late: bool = False
    """all_gather_gemm by copy engine, ``ws``: a quarter of the columns of the last shard to come comes by itself."""
    band: int = 1
    """gemm_reduce_scatter: row blocks per destination and step."""
    reducers: int = 4
    """gemm_reduce_scatter: CTAs that only add partials."""
    ws: bool = False
    """The warp-specialised kernels (Hopper only): ``comm`` > 0 means that every SM pushes."""
    ring: int = 2
    """``ws``: pieces of 64 columns that wait to be stored."""
    spread: int = 0
    """gemm_reduce_scatter, ``ws``: percent of a tile's time over which its pieces are sent."""

    def __post_init__(self) -> None:
        """Hash once: plans are looked up by in every call."""
        object.__setattr__(self, "_hash", hash(tuple(asdict(self).items())))

    def __hash__(self) -> int:
        """Equal plans have equal hashes."""
        return self._hash  # type: ignore[attr-defined]

    def chunk_k(self, k: int) -> int:
        """Columns of a chunk of an all_gather_gemm: whole k blocks."""
        return cdiv(cdiv(k, self.chunks), self.bk) * self.bk

    def edges(self, k: int) -> Edges:
        """What of a shard with ``k`` columns goes by itself: nothing where SMs push, or where pacing counts shards."""
        columns = cdiv(cdiv(k, 4), self.bk) * self.bk
        if self.comm or self.pace or columns >= k or not (self.early or self.late):
            return WHOLE
        return Edges(self.early, self.late, columns)

    def label(self) -> str:
        """Differences from the defaults, short."""
        base = asdict(KernelConfig())
        return " ".join(f"{key}={value}" for key, value in asdict(self).items() if value != base[key]) or "default"


def ag_plan(mp: int, n: int, k: int, tp: int, sms: int, ws: bool = False) -> KernelConfig:
    """The plan of an all_gather_gemm with ``mp`` rows a rank, without a tuner; ``ws`` as in :class:`KernelConfig`."""
    if ws:
        return _fewest_rounds(mp * tp, n, sms)[0]
    if mp * tp >= 4096 and n >= 2048:
        return KernelConfig()
    if n < 2048:
        return KernelConfig(comm=24, skip=-1, block=_block(mp, 128), bn=128)
    return KernelConfig(comm=12, skip=1, block=_block(mp, 128))


def rs_plan(mp: int, n: int, k: int, tp: int, sms: int, ws: bool = False) -> KernelConfig:
    """As :func:`ag_plan`, of a gemm_reduce_scatter."""
    if ws:
        return KernelConfig(ws=True, stages=3, ring=4, spread=0 if _link_bound(k, tp) else 75)
    return KernelConfig(stages=3, split=False, band=max(1, 8 // tp), reducers=4 if k >= 2048 else 12)


def _link_bound(k: int, tp: int) -> bool:
    """Whether sending a tile takes most of the time of computing it, on NVLink (350 GB/s, 700 TFLOP/s)."""
    return k < 2500 * (tp - 1) / tp


def _fewest_rounds(m: int, n: int, sms: int) -> list[KernelConfig]:
    """Both tile widths, first the one with less time in rounds: half a tile takes 0.53 of a whole one's time."""
    tiles = cdiv(m, 128) * cdiv(n, 256), cdiv(m, 128) * cdiv(n, 128)
    times = cdiv(tiles[0], sms), cdiv(tiles[1], sms) * 0.53
    plans = [KernelConfig(ws=True, group=16), KernelConfig(ws=True, group=16, bn=128, stages=6)]
    return plans if times[0] <= times[1] else plans[::-1]


def _block(mp: int, rows: int) -> int:
    """``rows`` if they divide a shard, else 0 (a whole shard)."""
    return rows if mp % rows == 0 and mp > rows else 0


def candidates(op: str, mp: int, n: int, k: int, tp: int, sms: int, ws: bool = False) -> list[KernelConfig]:
    """Plans worth measuring, the likeliest first; none where a slab has too few flags for any of them."""
    if op == "all_gather_gemm" and ws:
        first, second = _fewest_rounds(mp * tp, n, sms)
        found = [first, replace(first, early=True), replace(first, late=True), second, replace(second, late=True)]
        found = [plan for plan in found if not (plan.early or plan.late) or plan.edges(k) != WHOLE]
        # Two shards in a raster group, and a GEMM that is long beside its gather: the shards are there.
        if tp > 2 and 2 * (mp // 128) <= first.group and n >= 2048 * (tp - 1) / tp:
            found.insert(1, replace(first, span=2))
        found.append(replace(first, comm=1, chunks=8))
    elif op == "all_gather_gemm":
        found = [
            ag_plan(mp, n, k, tp, sms),
            KernelConfig(),
            KernelConfig(pace=True),
            KernelConfig(comm=24, skip=-1, block=_block(mp, 128), bn=128),
            KernelConfig(comm=12, skip=1, block=_block(mp, 128)),
        ]
    elif ws:
        first = rs_plan(mp, n, k, tp, sms, ws)
        spreads = (0, 40) if _link_bound(k, tp) else (75, 40)
        rows = cdiv(mp, 128)
        # 16 row blocks at a time, of all destinations: a round of tiles reads about as much of x as of the weight.
        wide = max(1, min(rows, 16 // tp))
        # Own tiles that fill the last round: nobody waits for them, and nothing is sent meanwhile.
        last = max(1, min(rows, cdiv(sms, cdiv(n, 256))))
        found = [replace(first, band=band, spread=spread) for band in (1, wide, last) for spread in spreads]
        found.append(replace(first, bn=128, stages=5))
    else:
        first = rs_plan(mp, n, k, tp, sms)
        found = [first] + [replace(first, reducers=r) for r in (4, 12)]
    return [plan for plan in dict.fromkeys(found) if _flags(op, plan, mp, n, tp) <= CALL_FLAGS]


def _flags(op: str, plan: KernelConfig, mp: int, n: int, tp: int) -> int:
    """How many flags a call of one of :func:`candidates` needs; :mod:`ops.launch.plain` raises with more."""
    if op == "gemm_reduce_scatter":  # one for each tile
        return cdiv(mp, plan.bm) * cdiv(n, plan.bn) * tp
    if plan.ws:  # one for each row that SMs push, of whose chunks there are as many as there are flags left
        return mp * tp if plan.comm else 2 * tp
    # One for each block of rows and each CTA that pushes a part of it.
    return tp * cdiv(mp, plan.block or mp) * (1 << (max(1, plan.comm) - 1).bit_length())
