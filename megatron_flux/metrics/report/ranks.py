"""Show the ranks of a training run in its sampled steps: own times, the straggler with its node, a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import Arms, figure_of
from megatron_flux.metrics.report.page import Figure, Part, Table
from megatron_flux.metrics.summary import Record, sampled
from megatron_flux.metrics.table import counted, finite, milliseconds, percent, shown

MOST_LISTED = 16
"""Of more ranks the slowest are listed."""
MOST_ROWS, MOST_COLUMNS = 256, 160
"""Cells of a heat map: of more ranks, or samples, neighbours share one."""
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
    """The sampled steps of one side since its ranks were last placed on nodes."""

    arm: str
    records: list[Record]
    nodes: list[str]
    """By rank; empty names if they were not recorded."""
    medians: dict[str, list[float | None]]
    """By column one value per rank."""
    own: np.ndarray
    """Own times (ms), [samples, ranks], NaN if not known; of whole steps where operators are not seen."""
    seen: bool
    """Operators are seen: those of stock, and inside CUDA graphs, are not."""
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
        often, ranks = self.times / len(self.records), len(self.nodes)
        # Chernoff's bound on how often any one of equal ranks is that often slowest.
        others = (1 - often) * math.log((1 - often) * ranks / (ranks - 1)) if often < 1 < ranks else 0.0
        chance = ranks * math.exp(-len(self.records) * (often * math.log(often * ranks) + others)) if often else 1.0
        return often >= 0.5 and chance < 0.01 and self.excess >= STRAGGLER

    def named(self, rank: int) -> str:
        """Return a rank with its node."""
        return f"rank {rank}" + (f" on {self.nodes[rank]}" if self.nodes[rank] else "")

    @property
    def finding(self) -> str:
        """How often the worst rank was slowest, and by how much."""
        text = f"slowest in {self.times} of {len(self.records)} sampled steps of {self.arm}"
        if not math.isfinite(self.excess_ms):
            return text
        by = f"{milliseconds(abs(self.excess_ms))} ms ({percent(abs(self.excess), 1)})"
        return f"{text}, {self.compared.format(f'{by} above' if self.excess_ms >= 0 else f'{by} below')}"


def _of_arm(arm: str, records: Sequence[Record]) -> Ranks | None:
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
    of_all, times = known["own_ms" if seen else "step_ms"], slowest[worst] if worst is not None else 0
    return Ranks(arm, kept, _nodes(about, width), medians, of_all, seen, worst, times, excess, excess / usual, compared)


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


def of_arms(arms: Arms) -> list[Ranks]:
    """Return the ranks of each side that has sampled them."""
    return [found for arm, records in arms.items() if (found := _of_arm(arm, records)) is not None]


def findings(known: Sequence[Ranks]) -> list[tuple[str, str]]:
    """Return a line for each side that a straggler holds up."""
    return [
        ("straggler", f"{of.named(of.worst)}: {of.finding}") for of in known if of.straggles and of.worst is not None
    ]


def parts(known: Sequence[Ranks]) -> list[Part]:
    """Return a heat map for each side, and a table of the ranks."""
    return [*map(_heat_part, known), *([_table_part(known)] if known else [])]


def _heat_part(of: Ranks) -> Part:
    caption = f"{counted(len(of.records), 'timed sampled step')}. "
    if not of.seen:
        caption += "Which rank waits for which is not known: operators of stock, and inside CUDA graphs, are not seen. "
    if of.worst is not None:
        caption += f"R{of.named(of.worst)[1:]} was {of.finding}"
        caption += ": a straggler." if of.straggles else ": no straggler." if of.seen else "."
    return Part(
        f"heat-{of.arm}", f"{'Own' if of.seen else 'Step'} time of every rank, {of.arm}", _heat_map(of), caption
    )


def _heat_map(of: Ranks) -> Figure:
    """Draw rank by sampled step; a cell of several shows the longest of their times."""
    samples, ranks = of.own.shape
    across, down = math.ceil(samples / MOST_COLUMNS), math.ceil(ranks / MOST_ROWS)
    padded = np.full((-(-samples // across) * across, -(-ranks // down) * down), -np.inf)
    padded[:samples, :ranks] = np.where(np.isfinite(of.own), of.own, -np.inf)
    cells = padded.reshape(len(padded) // across, across, -1, down).max(axis=(1, 3)).T
    z = [[float(f"{value:.5g}") if math.isfinite(value) else None for value in row] for row in cells.tolist()]
    known = of.own[np.isfinite(of.own)]
    low, high = (float(known.min()), float(np.percentile(known, 99.9))) if len(known) else (0.0, 1.0)
    bar = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "thickness": 10, "nticks": 4}
    bar |= {"title": {"text": "ms", "side": "right"}, "outlinewidth": 0, "len": 0.8, "tickangle": 0}
    trace: Figure = {"type": "heatmap", "z": z, "colorbar": bar, "zmin": low, "zmax": high}
    trace |= {"x": [record["iteration"] for record in of.records[::across]], "y": list(range(0, ranks, down))}
    trace |= {"colorscale": [[0, "var(--line)"], [1, f"var(--{of.arm})"]]}
    trace["hovertemplate"] = "rank %{y}, iteration %{x}<br>%{z:,.4g} ms<extra></extra>"
    axis = {"autorange": "reversed", "showgrid": False, "tickfont": {"size": 11}, "dtick": -(-ranks // 16)}
    layout: Figure = {"yaxis": axis, "xaxis": {"showgrid": False}, "height": 130 + min(max(30 * ranks, 60), 340)}
    return figure_of([trace], "iteration", "rank", **layout)


def _table_part(known: Sequence[Ranks]) -> Part:
    """List every rank of each side; of many those with the longest times."""
    names = [name for name in COLUMNS if any(value is not None for of in known for value in of.medians[name])]
    rows, caption = [], ""
    for of in known:
        times = of.medians["own_ms" if of.seen else "step_ms"]
        slowest = sorted(range(len(of.nodes)), key=lambda rank: -(times[rank] or 0.0))[:MOST_LISTED]
        if len(slowest) < len(of.nodes):
            caption = f"The {MOST_LISTED} slowest of {len(of.nodes)} ranks."
        for rank in sorted(slowest):
            name = f"{of.arm}, {of.named(rank)}" + (", straggler" if rank == of.worst and of.straggles else "")
            rows.append((name, *(shown(of.medians[n][rank], COLUMNS[n][1]) for n in names)))
    head = ("", *(COLUMNS[name][0] for name in names))
    return Part("ranks", "Ranks: medians of timed sampled steps", caption=caption, table=Table(rows, head))
