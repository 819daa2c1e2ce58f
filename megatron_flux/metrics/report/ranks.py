"""The ranks of a training run in its sampled steps: their own times over time, the straggler and its node, by node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import Arms, figure_of, label
from megatron_flux.metrics.report.render import Figure, Part, Table
from megatron_flux.metrics.summary import Record, sampled
from megatron_flux.metrics.table import counted, finite, milliseconds, percent, shown

FOLD_ABOVE = 16
"""More ranks than this are folded by node."""
MOST_ROWS, MOST_COLUMNS = 256, 160
"""Cells of a heat map: of more ranks, or samples, neighbours share one."""
STRAGGLER = 0.02
"""A straggler's own time is above that of the ranks it compares with by at least this share: all differ a little."""
NO_NODE = "node not recorded"

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
    """The sampled steps of one arm since its ranks were last spread over nodes."""

    arm: str
    records: list[Record]
    nodes: list[str]
    """Of every rank."""
    medians: dict[str, list[float | None]]
    """By column one value per rank."""
    own: np.ndarray
    """Own times (ms), [samples, ranks]; where operators are not seen, of whole steps; NaN where not known."""
    seen: bool
    """Whether operators are: stock's are not, nor those inside CUDA graphs."""
    worst: int | None
    """The rank that was slowest most often."""
    times: int
    """How often."""
    excess_ms: float
    """Median own time of ``worst`` beyond that of the ranks it compares with; NaN where not known."""
    excess: float
    """The same as a share of theirs."""
    compared: str
    """The comparison in words, with a place for its outcome."""

    @property
    def straggles(self) -> bool:
        """Whether ``worst`` is a straggler and not just the last of many that are alike.

        It was slowest in half of the samples, and some rank would be so often in less than 1 % of runs of equal ranks:
        of two ranks one always is slowest in half of them.
        """
        often, ranks = self.times / len(self.records), len(self.nodes)
        # Chernoff's bound on how often any one of equal ranks is that often slowest.
        others = (1 - often) * math.log((1 - often) * ranks / (ranks - 1)) if often < 1 < ranks else 0.0
        chance = ranks * math.exp(-len(self.records) * (often * math.log(often * ranks) + others)) if often else 1.0
        return often >= 0.5 and chance < 0.01 and self.excess >= STRAGGLER

    def named(self, rank: int) -> str:
        """A rank with its node."""
        return f"rank {rank}" + (f" on {node}" if (node := self.nodes[rank]) != NO_NODE else "")


def _of_arm(arm: str, records: Sequence[Record]) -> Ranks | None:
    about: Mapping[str, Any] = {}
    usable, spread = {id(record) for record in sampled(records)}, (None, None)
    kept: list[Record] = []
    for record in records:
        run = record.get("flux/run")
        if isinstance(run, dict) and (now := (run.get("nodes"), run.get("node_of_rank"))) != spread:
            about, spread, kept = run, now, []  # a requeued job has other nodes: its ranks are others
        times = (record.get("flux/ranks") or {}).get("step_ms")
        if id(record) in usable and isinstance(times, list) and times:
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
    slowest = Counter(r for record in kept if isinstance(r := record.get("flux/slowest_rank"), int) and r < width)
    worst = max(slowest, key=lambda rank: (slowest[rank], medians["own_ms"][rank] or 0.0), default=None)
    excess, usual, compared = _excess(worst, medians["own_ms"], about)
    of_all, times = known["own_ms" if seen else "step_ms"], slowest[worst] if worst is not None else 0
    return Ranks(arm, kept, _nodes(about, width), medians, of_all, seen, worst, times, excess, excess / usual, compared)


def _excess(worst: int | None, own: list[float | None], run: Mapping[str, Any]) -> tuple[float, float, str]:
    """Return how far the rank is behind the ranks it compares with, their median, and the comparison in words.

    Of its tensor-parallel group and the groups of its pipeline stage (their fastest ranks, as it would be without a
    straggler) those count that it is further behind. Records that do not name the groups are of one.
    """
    tp, dp = run.get("tp"), run.get("dp")
    if not (isinstance(tp, int) and isinstance(dp, int) and tp > 0 < dp and len(own) % (tp * dp) == 0):
        tp, dp = len(own), 1
    if worst is None or None in own:
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
    """Of every rank; only as it was recorded: which ranks a launcher puts where is not for a report to guess."""
    names, places = run.get("nodes"), run.get("node_of_rank")
    if isinstance(names, list) and len(names) == 1:
        return [str(names[0])] * width
    if isinstance(names, list) and isinstance(places, list) and len(places) == width:
        return [str(names[p]) if isinstance(p, int) and 0 <= p < len(names) else NO_NODE for p in places]
    return [NO_NODE] * width


def of_arms(arms: Arms) -> list[Ranks]:
    """What is known of the ranks of each arm; of an arm without samples nothing."""
    return [found for arm, records in arms.items() if (found := _of_arm(arm, records)) is not None]


def findings(known: Sequence[Ranks]) -> list[tuple[str, str]]:
    """A line for each arm that a straggler holds up."""
    return [
        ("straggler", f"{of.named(of.worst)}: {_slowest(of)}") for of in known if of.worst is not None and of.straggles
    ]


def _slowest(of: Ranks) -> str:
    """How often the worst rank was slowest, and by how much."""
    said = f"slowest in {of.times} of {len(of.records)} sampled steps of {of.arm}"
    if not math.isfinite(of.excess_ms):
        return said
    by = f"{milliseconds(abs(of.excess_ms))} ms ({percent(abs(of.excess), 1)})"
    return f"{said}, {of.compared.format(f'{by} above' if of.excess_ms >= 0 else f'{by} below')}"


def parts(known: Sequence[Ranks], spread: Part | None) -> list[Part]:
    """A heat map for each arm, and the ranks in a table; ``spread`` is shown between them."""
    made = [_heat_part(of) for of in known]
    if spread is not None:
        made.append(spread)
    if known:
        made.append(_table_part(known))
    return made


def _heat_part(of: Ranks) -> Part:
    what = "Own time" if of.seen else "Step time"
    figure, cell = _heat_map(of)
    caption = f"{counted(len(of.records), 'timed sampled step')}, one column each{cell}. "
    if not of.seen:
        caption += "Which rank waits for which is not known: operators of stock, and inside CUDA graphs, are not seen. "
    if of.worst is not None:
        caption += f"{of.named(of.worst).capitalize()} was {_slowest(of)}"
        caption += ": a straggler." if of.straggles else ": no straggler." if of.seen else "."
    return Part(f"heat-{of.arm}", f"{what} of every rank, {of.arm}", figure, caption)


def _heat_map(of: Ranks) -> tuple[Figure, str]:
    """Rank by sampled step, and what a cell is where that is more than one of them: the longest of its times."""
    samples, ranks = of.own.shape
    across, down = math.ceil(samples / MOST_COLUMNS), math.ceil(ranks / MOST_ROWS)
    padded = np.full((-(-samples // across) * across, -(-ranks // down) * down), np.nan)
    padded[:samples, :ranks] = of.own
    padded[~np.isfinite(padded)] = -np.inf
    cells = padded.reshape(len(padded) // across, across, -1, down).max(axis=(1, 3)).T
    z = [[float(f"{value:.5g}") if math.isfinite(value) else None for value in row] for row in cells.tolist()]
    known = of.own[np.isfinite(of.own)]
    low, high = (float(known.min()), float(np.percentile(known, 99.9))) if len(known) else (0.0, 1.0)
    bar = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "thickness": 10, "nticks": 4}
    bar |= {"title": {"text": "ms", "side": "right"}, "outlinewidth": 0, "len": 0.8, "tickangle": 0}
    unit = "ranks from" if down > 1 else "rank"
    trace: Figure = {"type": "heatmap", "z": z, "colorbar": bar, "zmin": low, "zmax": high}
    trace |= {"x": [record["iteration"] for record in of.records[::across]], "y": list(range(0, ranks, down))}
    trace |= {"colorscale": [[0, "var(--line)"], [1, f"var(--{of.arm})"]]}
    trace["hovertemplate"] = f"{unit} %{{y}}, iteration %{{x}}<br>%{{z:,.4g}} ms<extra></extra>"
    axis: Figure = {"autorange": "reversed", "showgrid": False, "tickfont": {"size": 11}, "dtick": -(-ranks // 16)}
    nodes = list(dict.fromkeys(of.nodes))
    if 1 < len(nodes) <= 32:
        axis |= {"tickvals": [of.nodes.index(node) for node in nodes], "ticktext": [label(_short(n)) for n in nodes]}
    layout: Figure = {"yaxis": axis, "xaxis": {"showgrid": False}, "height": 130 + min(max(30 * ranks, 60), 340)}
    layout["margin"] = {"l": 8, "r": 12, "t": 12, "b": 8}
    if of.straggles and of.worst is not None:
        where = _short(of.nodes[of.worst])
        says = {"text": f"straggler: rank {of.worst}<br>{label(where)}", "xref": "paper", "x": 0.02, "xanchor": "left"}
        says |= {"y": of.worst, "ax": 16, "ay": -22 if of.worst > ranks / 2 else 22, "arrowcolor": "var(--text)"}
        layout["annotations"] = [
            says | {"bgcolor": "var(--page)", "font": {"size": 12}, "arrowhead": 2, "align": "left"}
        ]
    more = f", the longest of {down} ranks and {across} samples in a cell" if across * down > 1 else ""
    return figure_of([trace], "iteration", "rank" if "tickvals" not in axis else "", **layout), more


def _short(node: str) -> str:
    """A host name that leaves room beside it on a phone."""
    name = node.partition(".")[0]
    return name if len(name) <= 14 else f"…{name[-13:]}"


def _table_part(known: Sequence[Ranks]) -> Part:
    """One line per rank and arm; of many ranks one fold per node, that of a straggler open."""
    title = "Ranks: medians of timed sampled steps"
    names = [name for name in COLUMNS if any(value is not None for of in known for value in of.medians[name])]
    head = ("", *(COLUMNS[name][0] for name in names))

    def rows(node: str | None = None) -> list[tuple[str, ...]]:
        found = []
        for of in known:
            several = node is None and len(set(of.nodes)) > 1
            for rank in (rank for rank, at in enumerate(of.nodes) if node in (None, at)):
                name = f"{of.arm}, {of.named(rank) if several else f'rank {rank}'}"
                name += ", straggler" if rank == of.worst and of.straggles else ""
                found.append((name, *(shown(of.medians[n][rank], COLUMNS[n][1]) for n in names)))
        return found

    if max(len(of.nodes) for of in known) <= FOLD_ABOVE:
        return Part("ranks", title, table=Table(rows(), head))
    folds = []
    for node in dict.fromkeys(node for of in known for node in of.nodes):
        said, marked, mine = [], "", []
        for of in known:
            mine = [rank for rank, at in enumerate(of.nodes) if at == node]
            name, what = ("own_ms", "own time") if of.seen else ("step_ms", "step")
            times = [time for rank in mine if (time := of.medians[name][rank]) is not None]
            said += [f"{of.arm} {what} {milliseconds(max(times))} ms"] if times else []
            marked = f"; straggler: rank {of.worst}" if of.straggles and of.worst in mine else marked
        together = mine and mine[-1] - mine[0] == len(mine) - 1
        which = f"ranks {mine[0]} to {mine[-1]}" if together else counted(len(mine), "rank")
        most = f"; longest: {', '.join(said)}" if said else ""
        folds.append((f"{node}: {which}{most}{marked}", Table(rows(node), head), bool(marked)))
    return Part("ranks", title, caption=f"{counted(len(folds), 'node')}; a line opens to its ranks.", folds=folds)
