"""The figures of a comparison: spread of step times, the interval of the speed-up, differences between curves.

All of them are plain functions of lists of records, so that each definition stands in one place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]

MIN_PAIRED_BLOCKS = 6
"""Fewest pairs of blocks that give an interval. In a simulation of drifting, skewed step times without any speed-up
(``results/interval-coverage``, 400 runs each) the interval below held the truth in 54 % of runs with 2 pairs, 89 % with
4 and 95 % with 6 and 8; and with fewer than 6 even a sign test cannot reach 95 %."""

RESAMPLES = 2000
SEED = 0


def counts(record: Record) -> bool:
    """Whether the time of this iteration counts: no warm-up, and no profiler, which slows a step."""
    return not record["warmup"] and not record.get("profiled")


def timed(records: Sequence[Record]) -> list[Record]:
    """The records that count for timing."""
    return [record for record in records if counts(record)]


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """``{"median", "p10", "p90", "n"}`` of ``values``, percentiles interpolated linearly; None where empty."""
    if not values:
        return {"median": None, "p10": None, "p90": None, "n": 0}
    p10, median, p90 = (float(value) for value in np.percentile(values, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def median_of(records: Sequence[Record], name: str) -> float | None:
    """Median of a field over the records that know it; None when none does."""
    values = [record[name] for record in records if record.get(name) is not None]
    return float(np.median(values)) if values else None


def paired_blocks(baseline: Sequence[Record], flux: Sequence[Record]) -> list[tuple[list[float], list[float]]]:
    """Step times (s) of the first block of each arm, of the second of each, and so on, without warm-up.

    In A B B A order the k-th blocks of the two arms are neighbours in time, so drift of the machine hits both alike.
    A pair in which either arm has no timed step is left out, and so are blocks whose partner never ran.
    """

    def blocks(records: Sequence[Record]) -> list[list[float]]:
        by_block: dict[int, list[float]] = {}
        for record in records:
            times = by_block.setdefault(record["block"], [])
            if counts(record):
                times.append(record["iteration-time"])
        return [by_block[block] for block in sorted(by_block)]

    # Blocks of warm-up only are paired before they are dropped, else all later pairs would shift against each other.
    return [(b, f) for b, f in zip(blocks(baseline), blocks(flux), strict=False) if b and f]


def speedup_interval(pairs: Sequence[tuple[list[float], list[float]]]) -> list[float] | None:
    """95 % interval of median(baseline) / median(flux): percentile bootstrap that draws pairs of blocks.

    Steps of one block share the machine's state and are not independent, so whole pairs are drawn, not steps. Seeded:
    the same records give the same interval. None with fewer than :data:`MIN_PAIRED_BLOCKS` pairs.
    """
    if len(pairs) < MIN_PAIRED_BLOCKS:
        return None
    baseline = [np.asarray(pair[0]) for pair in pairs]
    flux = [np.asarray(pair[1]) for pair in pairs]
    draws = np.random.default_rng(SEED).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    ratios = [
        np.median(np.concatenate([baseline[i] for i in draw])) / np.median(np.concatenate([flux[i] for i in draw]))
        for draw in draws
    ]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return [float(low), float(high)]


def relative_difference(baseline: float, flux: float) -> float:
    """``|flux - baseline| / |baseline|``; 0 if both are 0, infinite if only the baseline is.

    NaN if either is not finite: two curves that both became NaN agree in nothing that could be compared.
    """
    if not (math.isfinite(baseline) and math.isfinite(flux)):
        return math.nan
    if baseline == 0:
        return 0.0 if flux == 0 else math.inf
    return abs(flux - baseline) / abs(baseline)


def relative_differences(baseline: Sequence[Record], flux: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """``(iteration, relative difference)`` of a field over the iterations that both arms have, in order."""
    of_flux = {record["iteration"]: record[name] for record in flux}
    return [
        (record["iteration"], relative_difference(record[name], of_flux[record["iteration"]]))
        for record in baseline
        if record["iteration"] in of_flux
    ]


def largest(differences: Sequence[tuple[int, float]]) -> float | None:
    """The largest difference; NaN if any is NaN (``max`` alone may drop it); None if there is none."""
    if not differences:
        return None
    return float(np.max([difference for _, difference in differences]))


def overlap_efficiency(time: float | None, gemm: float, serial: float) -> float | None:
    """FLUX's overlap efficiency (arXiv 2406.06858), all times in one unit: 1 is GEMM alone, 0 is both in turn.

    None where the time is not known, or where in turn takes no longer than the GEMM: nothing could be hidden.
    """
    if time is None or serial <= gemm:
        return None
    return (serial - time) / (serial - gemm)
