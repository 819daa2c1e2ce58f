"""Show the ranks of a training run in its sampled steps: own times, and the one that was slowest most often.

The record names each sampled step's slowest rank and how far it is behind the fastest of those it compares with
(``flux/slowest_rank``, ``flux/rank_spread_ms``). Here these are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_flux.metrics.report.figures import Variants
from megatron_flux.metrics.report.page import Part, Table
from megatron_flux.metrics.summary import Record, median, median_of, sampled
from megatron_flux.metrics.table import percent, short, shown

MOST_LISTED = 16
"""Ranks in the table; of more ranks, the slowest."""

COLUMNS = {
    "own_ms": ("own (ms)", "{:,.1f}".format),
    "step_ms": ("step (ms)", "{:,.1f}".format),
    "operators_ms": ("in operators (ms)", "{:.1f}".format),
    "reduction_ms": ("in the gradient reduction (ms)", "{:.1f}".format),
    "peak_memory_bytes": ("peak (GiB)", lambda size: f"{size / 2**30:.2f}"),
    "sm_clock_mhz": ("SM clock (MHz)", "{:.0f}".format),
    "power_w": ("power (W)", "{:.0f}".format),
    "temperature_c": ("°C", "{:.0f}".format),
}


class _Ranks(NamedTuple):
    """The sampled steps of one variant since its ranks were last placed on nodes."""

    names: list[str]
    """``rank 0 on node1``; without the node in records that lack it."""
    medians: dict[str, list[float | None]]
    """One value per rank, by column; own times only if operators are seen: not in stock, nor inside CUDA graphs."""
    finding: str
    """The rank that was slowest most often, and by how much; empty if there is none."""


def _of_variant(variant: str, records: Sequence[Record]) -> _Ranks | None:
    about: Mapping[str, Any] = {}
    usable = {record["iteration"] for record in sampled(records)}
    kept: list[Record] = []
    for record in records:
        if run := record.get("flux/run"):
            if any(run.get(name) != about.get(name) for name in ("nodes", "node_of_rank")):
                kept = []  # a requeued job has other nodes: its ranks are others
            about = run
        if record["iteration"] in usable and record.get("flux/ranks"):
            kept.append(record)
    if not kept:
        return None
    width = len(kept[-1]["flux/ranks"]["step_ms"])
    unknown = [None] * width
    columns = {name: [record["flux/ranks"].get(name, unknown) for record in kept] for name in COLUMNS}
    known = {name: np.array(rows, dtype=float).reshape(len(kept), width) for name, rows in columns.items()}
    waits = known["operators_ms"] + np.nan_to_num(known["reduction_ms"])
    known["own_ms"] = known["step_ms"] - np.where(np.any(known["operators_ms"] > 0), waits, np.nan)
    medians = {name: [median(column) for column in values.T.tolist()] for name, values in known.items()}
    nodes = [about["nodes"][place] for place in about.get("node_of_rank", [])] or [""] * width
    names = [f"rank {rank} on {node}" if node else f"rank {rank}" for rank, node in enumerate(nodes)]
    slowest = Counter(record["flux/slowest_rank"] for record in kept if record.get("flux/slowest_rank") is not None)
    if not slowest:
        return _Ranks(names, medians, "")
    worst, times = max(slowest.items(), key=lambda of: (of[1], medians["own_ms"][of[0]] or 0.0))
    finding = f"R{names[worst][1:]}: slowest in {times} of {len(kept)} sampled steps of {variant}"
    behind = median_of([record for record in kept if record.get("flux/slowest_rank") == worst], "flux/rank_spread_ms")
    if behind and (own := medians["own_ms"][worst]):
        finding += f", {short(behind)} ms ({percent(behind / own, 1)} of its own time) behind the fastest that it "
        finding += "compares with"
    return _Ranks(names, medians, f"{finding}.")


def part(variants: Variants) -> Part | str:
    """Show every rank in a table: of many those with the longest times. Without samples return that as the reason."""
    every = {variant: _of_variant(variant, records) for variant, records in variants.items()}
    known = {variant: of for variant, of in every.items() if of is not None}
    if not known:
        return "no step sampled its ranks."
    columns = [name for name in COLUMNS if any(set(of.medians[name]) != {None} for of in known.values())]
    rows, caption = [], [of.finding for of in known.values() if of.finding]
    for variant, (names, medians, _) in known.items():
        times = medians["step_ms" if medians["own_ms"][0] is None else "own_ms"]
        slowest = sorted(range(len(names)), key=lambda rank: -(times[rank] or 0.0))[:MOST_LISTED]
        for rank in sorted(slowest):
            cells = (shown(medians[name][rank], COLUMNS[name][1]) for name in columns)
            rows.append((f"{variant}, {names[rank]}", *cells))
    if len(names) > MOST_LISTED:
        caption.append(f"Listed are the {MOST_LISTED} slowest of {len(names)}.")
    table = Table(rows, ("", *(COLUMNS[name][0] for name in columns)))
    return Part("ranks", "Ranks: medians of sampled steps", caption=" ".join(caption), table=table)
