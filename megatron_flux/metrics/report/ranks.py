"""Show the ranks of a training run in its sampled steps: medians of their times, memory and GPUs.

A rank's own time is its step without flux's operators and the gradient reduction, in which it waits for others. It is
known only if operators are seen: not in stock, nor inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import Variants
from megatron_flux.metrics.report.page import Part, Table
from megatron_flux.metrics.summary import Record, median, sampled
from megatron_flux.metrics.table import shown

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


def _of_variant(records: Sequence[Record]) -> tuple[list[str], dict[str, list[float | None]]] | None:
    """Return the ranks' names, and one value per rank by column, since the ranks were last placed on nodes."""
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
    return [f"rank {rank} on {node}" if node else f"rank {rank}" for rank, node in enumerate(nodes)], medians


def part(variants: Variants) -> Part | str:
    """Show every rank in a table: of many those with the longest times. Without samples return that as the reason."""
    found = {variant: _of_variant(records) for variant, records in variants.items()}
    known = {variant: of for variant, of in found.items() if of is not None}
    if not known:
        return "no step sampled its ranks."
    columns = [name for name in COLUMNS if any(set(medians[name]) != {None} for _, medians in known.values())]
    rows, caption = [], ""
    for variant, (names, medians) in known.items():
        times = medians["step_ms" if medians["own_ms"][0] is None else "own_ms"]
        slowest = sorted(range(len(names)), key=lambda rank: -(times[rank] or 0.0))[:MOST_LISTED]
        if len(names) > MOST_LISTED:
            caption = f"Listed are the {MOST_LISTED} slowest of {len(names)}."
        for rank in sorted(slowest):
            cells = (shown(medians[name][rank], COLUMNS[name][1]) for name in columns)
            rows.append((f"{variant}, {names[rank]}", *cells))
    table = Table(rows, ("", *(COLUMNS[name][0] for name in columns)))
    return Part("ranks", "Ranks: medians of sampled steps", caption=caption, table=table)
