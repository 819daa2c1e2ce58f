"""Show the ranks of a training run in its sampled steps: own times, and the straggler with its node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import Variants, samples
from megatron_flux.metrics.report.page import Part, Table
from megatron_flux.metrics.summary import Record, sampled
from megatron_flux.metrics.table import finite, milliseconds, percent, shown

MOST_LISTED = 16
"""Of more ranks the slowest are listed."""
STRAGGLER = 0.02
"""A straggler's own time is above that of the ranks it compares with by at least this share: all differ a little."""

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
    """By rank; empty names if they were not recorded."""
    medians: dict[str, list[float | None]]
    """By column one value per rank; own times only if operators are seen: not of stock, nor inside CUDA graphs."""
    worst: int | None
    """The rank that was slowest most often."""
    times: int
    """How often."""
    excess_ms: float
    """Median own time of ``worst`` beyond that of the ranks it compares with; NaN if not known."""
    excess: float
    """The same as a share of theirs."""
    compared: str
    """The comparison in words, with a place for its outcome."""

    @property
    def straggles(self) -> bool:
        """True if ``worst`` is a straggler and not just the last of many that are alike.

        It was slowest in half of the samples, and some rank would be so often in less than 1 % of runs of equal ranks:
        of two ranks one always is slowest in half of them.
        """
        often, ranks = self.times / self.samples, len(self.nodes)
        # Chernoff's bound on how often any one of equal ranks is that often slowest.
        others = (1 - often) * math.log((1 - often) * ranks / (ranks - 1)) if often < 1 < ranks else 0.0
        chance = ranks * math.exp(-self.samples * (often * math.log(often * ranks) + others)) if often else 1.0
        return often >= 0.5 and chance < 0.01 and self.excess >= STRAGGLER

    def named(self, rank: int) -> str:
        """Return a rank with its node."""
        return f"rank {rank}" + (f" on {self.nodes[rank]}" if self.nodes[rank] else "")

    @property
    def finding(self) -> str:
        """The worst rank, how often it was slowest, and by how much; empty if there is none."""
        if self.worst is None:
            return ""
        text = f"{self.named(self.worst)}: slowest in {self.times} of {self.samples} sampled steps of {self.variant}"
        if not math.isfinite(self.excess_ms):
            return text
        by = f"{milliseconds(abs(self.excess_ms))} ms ({percent(abs(self.excess), 1)})"
        return f"{text}, {self.compared.format(f'{by} above' if self.excess_ms >= 0 else f'{by} below')}"


def _of_variant(variant: str, records: Sequence[Record]) -> Ranks | None:
    about: Mapping[str, Any] = {}
    usable, placed = {id(record) for record in sampled(records)}, (None, None)
    kept: list[Record] = []
    for record in records:
        if (run := record.get("flux/run")) and (now := (run.get("nodes"), run.get("node_of_rank"))) != placed:
            about, placed, kept = run, now, []  # a requeued job has other nodes: its ranks are others
        if id(record) in usable and (record.get("flux/ranks") or {}).get("step_ms"):
            kept.append(record)
    if not kept:
        return None
    width = len(kept[-1]["flux/ranks"]["step_ms"])
    kept = [record for record in kept if len(record["flux/ranks"]["step_ms"]) == width]
    known = {name: np.array([_row(r["flux/ranks"].get(name), width) for r in kept]) for name in COLUMNS}
    seen = bool((known["operators_ms"] > 0).any())
    waits = known["operators_ms"] + np.nan_to_num(known["reduction_ms"])
    known["own_ms"] = known["step_ms"] - (waits if seen else math.nan)
    medians = {name: [_median(column) for column in values.T] for name, values in known.items()}
    slowest = Counter(record["flux/slowest_rank"] for record in kept if record.get("flux/slowest_rank") is not None)
    worst = max(slowest, key=lambda rank: (slowest[rank], medians["own_ms"][rank] or 0.0), default=None)
    excess, usual, compared = _excess(worst, medians["own_ms"], about)
    times = slowest[worst] if worst is not None else 0
    return Ranks(variant, len(kept), _nodes(about, width), medians, worst, times, excess, excess / usual, compared)


def _excess(worst: int | None, own: list[float | None], run: Mapping[str, Any]) -> tuple[float, float, str]:
    """Return how far the rank is behind the ranks it compares with, their median, and the comparison in words.

    Of its tensor-parallel group and the groups of its pipeline stage (their fastest ranks, as it would be without a
    straggler) those count that it is further behind. Records that do not name the groups are of one.
    """
    tp, dp = run.get("tp") or len(own), run.get("dp") or 1
    if worst is None or None in own or len(own) % (tp * dp):
        return math.nan, math.nan, ""
    times = np.array(own, dtype=float).reshape(-1, dp, tp)
    stage, group, rank = worst // tp // dp, worst // tp % dp, worst % tp
    best = times[stage].min(axis=-1)
    found: list[tuple[float, float, str]] = []
    if tp > 1:
        usual = float(np.median(np.delete(times[stage, group], rank)))
        name = "its own time {} the median rank's" + (" of its tensor-parallel group" if tp < len(own) else "")
        found.append((times[stage, group, rank] - usual, usual, name))
    if dp > 1:
        usual = float(np.median(np.delete(best, group)))
        name = "its own time {} the median rank's of its stage" if tp == 1 else "its group's time {} the median group's"
        found.append((best[group] - usual, usual, name))
    return max(found, default=(math.nan, math.nan, ""))


def _row(values: Any, width: int) -> list[float]:
    if not isinstance(values, list) or len(values) != width:
        return [math.nan] * width
    return [float(value) if finite(value) else math.nan for value in values]


def _median(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _nodes(run: Mapping[str, Any], width: int) -> list[str]:
    """Return the node of every rank, as recorded: a report does not guess where a launcher puts ranks."""
    names, places = run.get("nodes") or [], run.get("node_of_rank") or []
    if len(names) == 1:
        return [str(names[0])] * width
    return [str(names[place]) for place in places] if len(places) == width else [""] * width


def of_variants(variants: Variants) -> list[Ranks]:
    """Return the ranks of each variant that has sampled them."""
    return [found for variant, records in variants.items() if (found := _of_variant(variant, records)) is not None]


def findings(known: Sequence[Ranks]) -> list[tuple[str, str]]:
    """Return a line for each variant that a straggler holds up."""
    return [("straggler", of.finding) for of in known if of.straggles]


def part(variants: Variants, known: Sequence[Ranks]) -> Part:
    """Show the spread of the ranks over time, and every rank in a table: of many those with the longest times."""
    spread, caption = samples(variants, "spread of ranks (ms)", lambda record: record.get("flux/rank_spread_ms"))
    caption = f"Spread: how far the slowest rank is behind those it compares with; {caption}" if spread else ""
    names = [name for name in COLUMNS if any(value is not None for of in known for value in of.medians[name])]
    rows, listed = [], ""
    for of in known:
        if of.finding:
            caption += f" R{of.finding[1:]}{': a straggler.' if of.straggles else ': no straggler.'}"
        times = of.medians["own_ms"] if None not in of.medians["own_ms"] else of.medians["step_ms"]
        slowest = sorted(range(len(of.nodes)), key=lambda rank: -(times[rank] or 0.0))[:MOST_LISTED]
        if len(slowest) < len(of.nodes):
            listed = f" Listed are the {MOST_LISTED} slowest of {len(of.nodes)}."
        for rank in sorted(slowest):
            name = f"{of.variant}, {of.named(rank)}" + (", straggler" if rank == of.worst and of.straggles else "")
            rows.append((name, *(shown(of.medians[n][rank], COLUMNS[n][1]) for n in names)))
    head = ("", *(COLUMNS[name][0] for name in names))
    return Part("ranks", "Ranks: medians of sampled steps", spread, f"{caption}{listed}".strip(), Table(rows, head))
