"""Compare candidates whose turns had different numbers of rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROUNDS = 30
FITS, FAR = 3, 4.0
"""Fits, of which later ones leave out turns that are so many times as far off as half of the turns are."""


class Timed(NamedTuple):
    """A turn that was timed."""

    candidate: int
    rows: int
    ms: float


def effects_of(turns: Sequence[Timed]) -> dict[int, list[float]]:
    """Return, for turns of each candidate, how much longer they took than calls of as many rows, as logarithms.

    The logarithm of a time is taken for the sum of what the rows and the candidate cost, which least squares tell apart.
    Rows that one candidate alone has had say nothing. Where such are all that some candidate has, times a row are
    compared: less good, since a call of few rows takes the host as long as one of many.
    """
    candidates = {turn.candidate for turn in turns}
    had: dict[int, set[int]] = defaultdict(set)
    for turn in turns:
        had[turn.rows].add(turn.candidate)
    shared = [turn for turn in turns if len(had[turn.rows]) > 1]
    if {turn.candidate for turn in shared} != candidates:
        shared = [Timed(turn.candidate, 1, turn.ms / turn.rows) for turn in turns]
    logs = [(turn.candidate, turn.rows, math.log(turn.ms)) for turn in shared]
    kept, effects, by_rows = logs, dict[int, float](), dict[int, float]()
    for _ in range(FITS):
        effects, by_rows = _fit(kept)
        off = [abs(log - effects[candidate] - by_rows[rows]) for candidate, rows, log in kept]
        most = FAR * statistics.median(off) if off else 0.0
        left = [one for one, far in zip(kept, off, strict=True) if far <= most]
        if {one[0] for one in left} != candidates or {one[1] for one in left} != by_rows.keys():
            break
        kept = left
    found: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    for candidate, rows, log in logs:
        found[candidate].append(log - by_rows[rows])
    return found


_Log = tuple[int, int, float]
"""A candidate, its rows, and the logarithm of a time."""


def _fit(logs: Sequence[_Log]) -> tuple[dict[int, float], dict[int, float]]:
    """Return what candidates and rows cost, by least squares: each in turn, until nothing changes."""
    effects, by_rows = dict.fromkeys((candidate for candidate, *_ in logs), 0.0), dict[int, float]()
    for _ in range(ROUNDS):
        by_rows = _means((rows, log - effects[candidate]) for candidate, rows, log in logs)
        effects = _means((candidate, log - by_rows[rows]) for candidate, rows, log in logs)
    return effects, by_rows


def _means(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: statistics.fmean(values) for key, values in groups.items()}
