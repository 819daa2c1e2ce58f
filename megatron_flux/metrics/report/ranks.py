"""Show the ranks of a training run in its sampled steps: own times, and the one that was slowest most often.

The record names each sampled step's slowest rank and how far it is behind the fastest of those it compares with
(``flux/slowest_rank``, ``flux/rank_spread_ms``). Here these are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass
class Ranks:
    """The sampled steps of one variant since its ranks were last placed on nodes."""

    variant: str
    samples: int
    nodes: list[str]
    """Names of nodes by rank; empty in records that lack them."""
    medians: dict[str, list[float | None]]
    """One value per rank, by column; own times only if operators are seen: not in stock, nor inside CUDA graphs."""
    worst: int | None
    """The rank that was slowest most often."""
    times: int
    """Samples in which it was."""
    behind_ms: float | None
    """Its median distance from the fastest rank that it compares with, when it was slowest."""

    def named(self, rank: int) -> str:
        """Return a rank with its node."""
        return f"rank {rank}" + (f" on {self.nodes[rank]}" if self.nodes[rank] else "")

    @property
    def finding(self) -> str:
        """The worst rank, how often it was slowest, and by how much; empty if there is none."""
        if self.worst is None:
            return ""
        text = f"{self.named(self.worst)}: slowest in {self.times} of {self.samples} sampled steps of {self.variant}"
        own = self.medians["own_ms"][self.worst]
        if not self.behind_ms or not own:
            return text
        behind = f"{short(self.behind_ms)} ms ({percent(self.behind_ms / own, 1)} of its own time)"
        return f"{text}, {behind} behind the fastest that it compares with"


def _of_variant(variant: str, records: Sequence[Record]) -> Ranks | None:
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
    slowest = Counter(record["flux/slowest_rank"] for record in kept if record.get("flux/slowest_rank") is not None)
    worst, times = max(slowest.items(), key=lambda of: (of[1], medians["own_ms"][of[0]] or 0.0), default=(None, 0))
    behind = median_of([r for r in kept if r.get("flux/slowest_rank") == worst], "flux/rank_spread_ms")
    nodes = [about["nodes"][place] for place in about.get("node_of_rank", [])] or [""] * width
    return Ranks(variant, len(kept), nodes, medians, worst, times, behind)


def of_variants(variants: Variants) -> list[Ranks]:
    """Return the ranks of each variant that has sampled them."""
    return [found for variant, records in variants.items() if (found := _of_variant(variant, records)) is not None]


def part(known: Sequence[Ranks]) -> Part:
    """Show every rank in a table: of many those with the longest times."""
    names = [name for name in COLUMNS if any(value is not None for of in known for value in of.medians[name])]
    rows, findings, listed = [], [], ""
    for of in known:
        if of.finding:
            findings.append(f"R{of.finding[1:]}.")
        times = of.medians["own_ms" if "own_ms" in names and of.medians["own_ms"][0] is not None else "step_ms"]
        slowest = sorted(range(len(of.nodes)), key=lambda rank: -(times[rank] or 0.0))[:MOST_LISTED]
        if len(slowest) < len(of.nodes):
            listed = f"Listed are the {MOST_LISTED} slowest of {len(of.nodes)}."
        for rank in sorted(slowest):
            name = f"{of.variant}, {of.named(rank)}"
            rows.append((name, *(shown(of.medians[n][rank], COLUMNS[n][1]) for n in names)))
    head = ("", *(COLUMNS[name][0] for name in names))
    caption = " ".join(filter(None, (*findings, listed)))
    return Part("ranks", "Ranks: medians of sampled steps", caption=caption, table=Table(rows, head))
