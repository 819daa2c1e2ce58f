"""What people see of ``bench inference``: a table for each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import IO, Any

from megatron_flux.bench.inference_config import KINDS
from megatron_flux.bench.report import print_table
from megatron_flux.metrics.table import link, multicast, number

Row = Mapping[str, Any]

EXPLANATION = (
    "ms: median (quartiles) of the slowest rank, of one pass, call or MLP; x: over stock, the faster of te and "
    "local, cuBLAS with NCCL, or the plain int4 form. floor leaves communication out: its numbers are wrong on "
    "purpose."
)
CACHE = (
    "decode: one token of each sequence behind a cache of {} tokens' keys and values, in megatron-core's static "
    "inference context, the same in all arms."
)
NO_CACHE = "decode attends to the tokens of the pass alone, without a cache of keys and values."
UNEQUAL = "NO: differs from stock"


def name_of(row: Row) -> str:
    """What was run, beside its rows."""
    if "layers" in row:
        return f"{row['model']}, {row['layers']} layer{'s' if row['layers'] > 1 else ''}"
    return f"{row['model']}, {row['layer']}" if "layer" in row else row["model"]


def by_arm(rows: Sequence[Row]) -> dict[str, Row]:
    """Of one case."""
    return {row["arm"]: row for row in rows}


def cases(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, str, int], list[Row]]]:
    """Rows of the same work, by kind, name and m."""
    for key, found in groupby(rows, key=lambda row: (row["kind"], name_of(row), row["m"])):
        yield key, list(found)


def _cell(row: Row | None, compared: bool) -> str:
    """``compared``: with the factor over stock."""
    if row is None:
        return "-"
    ms = f"{row['ms']:.4f} ({row['ms_low']:.4f}-{row['ms_high']:.4f})"
    return f"{ms} {number(row['speedup_vs_stock'], '.2f', 'x')}" if compared else ms


def show_inference(summary: Row, file: IO[str] | None = None) -> None:
    """Print a table per kind, what was skipped and why."""
    about = f"{summary['device']}, tp {summary['tp']}, {link(summary)}, {multicast(summary.get('environment'))}"
    print(about, file=file)
    if summary["note"]:
        print(summary["note"], file=file)
    compared = not summary["note"]
    for kind in KINDS:
        rows = [row for row in summary["rows"] if row["kind"] == kind]
        if not rows:
            continue
        arms = list(dict.fromkeys(row["arm"] for row in rows))
        cells = [
            [name, str(m), *(_cell(by_arm(found).get(arm), compared) for arm in arms)]
            for (_, name, m), found in cases(rows)
        ]
        print_table(kind, ("<model", "m", *arms), cells, *_notes(rows), file=file)
    words = ("kind", "model", "arm")
    lines = (f"{' '.join(one[w] for w in words if w in one)} skipped: {one['reason']}" for one in summary["skipped"])
    for line in dict.fromkeys(lines):  # whatever the number of layers and m
        print(line, file=file)
    print(EXPLANATION, file=file)
    if any(row["kind"] == "decode" for row in summary["rows"]):
        context = summary.get("context_length")
        print(CACHE.format(context) if context else NO_CACHE, file=file)


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """What a reader of the times has to know."""
    graphs = [row for row in rows if "cuda_graph" in row]
    if graphs and all(row["cuda_graph"] for row in graphs):
        yield "every arm in one CUDA graph"
    for row in rows:
        what = f"{name_of(row)}, m {row['m']}, {row['arm']}"
        if row.get("cuda_graph_reason"):
            yield f"{what}: no CUDA graph: {row['cuda_graph_reason']}"
        if (row.get("agreement") or {"ok": True})["ok"] is False:
            yield f"{what}: {UNEQUAL}: {row['agreement']}"
    stock: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for reason, calls in row.get("flux_fallbacks", {}).items():
            stock[row["arm"], reason] += calls
    for (arm, reason), calls in stock.items():
        yield f"{arm}: {calls} calls ran stock: {reason}"
