"""Compare candidates whose turns had different numbers of rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROUNDS, FITS = 10, 4
SETTLED = 1e-6
"""Change of all effects behind which further rounds tell nothing."""
NEAR = 0.01
"""Turns that are farther off weigh less, and less still where half of the turns are nearer."""


class Timed(NamedTuple):
    """A turn that was timed."""

    candidate: int
    rows: int
    ms: float
    busy: bool = True
    """The GPU was behind the host on all ranks, so the host's time is no part of it."""
    host: float = 0.0


def effects_of(turns: Sequence[Timed]) -> dict[int, list[float]]:
    """Return, for turns of each candidate, how much longer they took than calls of as many rows, as logarithms.

    The logarithm of a time is taken for the sum of what the rows and the candidate cost. Least squares tell them apart,
    in which turns that are far off weigh little. Rows that one candidate alone has had say nothing. Where such are all
    that some candidate has, times a row are compared: less good, since a call of few rows takes the host as long as one
    of many.
    """
    candidates = {turn.candidate for turn in turns}
    had: dict[int, set[int]] = defaultdict(set)
    for turn in turns:
        had[turn.rows].add(turn.candidate)
    shared = [turn for turn in turns if len(had[turn.rows]) > 1]
    if {turn.candidate for turn in shared} != candidates:
        shared = [Timed(turn.candidate, 1, turn.ms / turn.rows) for turn in turns]
    logs = [math.log(turn.ms) for turn in shared]
    weights, by_rows = [1.0] * len(logs), dict[int, float]()
    for _ in range(FITS if shared else 0):
        effects, known = dict.fromkeys(candidates, 0.0), [*zip(shared, weights, logs, strict=True)]
        for _ in range(ROUNDS):
            by_rows = _means((turn.rows, weight, log - effects[turn.candidate]) for turn, weight, log in known)
            last = effects
            effects = _means((turn.candidate, weight, log - by_rows[turn.rows]) for turn, weight, log in known)
            if all(abs(effect - last[candidate]) < SETTLED for candidate, effect in effects.items()):
                break
        off = [abs(log - effects[turn.candidate] - by_rows[turn.rows]) for turn, _, log in known]
        near = max(NEAR, statistics.median(off))
        weights = [min(1.0, near / max(far, NEAR)) for far in off]
    found: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    for turn, log in zip(shared, logs, strict=True):
        found[turn.candidate].append(log - by_rows[turn.rows])
    return found


def _means(weighted: Iterable[tuple[int, float, float]]) -> dict[int, float]:
    """Return the mean of values by key; each comes with its weight."""
    sums: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for key, weight, value in weighted:
        total, weights = sums[key]
        sums[key] = total + weight * value, weights + weight
    return {key: total / weights for key, (total, weights) in sums.items()}
