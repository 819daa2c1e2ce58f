"""Sets of points in time as lists of intervals."""

from __future__ import annotations

Interval = tuple[float, float]


def union(intervals: list[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[Interval]) -> float:
    """The length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What two unions have in common."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlap(a: list[Interval], b: list[Interval]) -> float:
    """The length of what two unions have in common."""
    return length(common(a, b))
