"""Compare candidates whose turns had different numbers of rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROUNDS = 10


class Timed(NamedTuple):
    """A turn that was timed."""

    candidate: int
    rows: int
    ms: float


def effects_of(turns: Sequence[Timed]) -> dict[int, list[float]]:
    """Return, for turns of each candidate, how much longer they took than calls of as many rows, as logarithms.

    The logarithm of a time is taken for the sum of what the rows and the candidate cost, and both are fitted in turns,
    by medians (Tukey's median polish). Rows that one candidate alone has had say nothing. Where such are all that some
    candidate has, times a row are compared: less good, since a call of few rows takes the host as long as one of many.
    """
    candidates = {turn.candidate for turn in turns}
    had: dict[int, set[int]] = defaultdict(set)
    for turn in turns:
        had[turn.rows].add(turn.candidate)
    shared = [turn for turn in turns if len(had[turn.rows]) > 1]
    if {turn.candidate for turn in shared} != candidates:
        shared = [Timed(turn.candidate, 1, turn.ms / turn.rows) for turn in turns]
    logs = [(turn.candidate, turn.rows, math.log(turn.ms)) for turn in shared]
    effects, by_rows = dict.fromkeys(candidates, 0.0), dict[int, float]()
    for _ in range(ROUNDS):
        by_rows = _medians((rows, log - effects[candidate]) for candidate, rows, log in logs)
        effects = _medians((candidate, log - by_rows[rows]) for candidate, rows, log in logs)
    found: dict[int, list[float]] = {candidate: [] for candidate in effects}
    for candidate, rows, log in logs:
        found[candidate].append(log - by_rows[rows])
    return found


def _medians(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: statistics.median(values) for key, values in groups.items()}
