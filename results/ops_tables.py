"""Tables of ``bench ops`` for the READMEs: one run by itself, and calls that two runs share beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_flux.bench import report
from results.readme_tables import SHORT, X, percent, table

Row = Mapping[str, Any]


def named(row: Row) -> list[str]:
    """A call and its sizes."""
    name = f"{SHORT[row['op']]} {row['model']} {row['layer']} {row['direction']}"
    return [name, f"{row['m']}{X}{row['n']}{X}{row['k']}"]


def efficiency(row: Row, method: str) -> str:
    """FLUX's overlap efficiency of a method; ``-`` where there is none."""
    found = report.efficiency(row, method)
    return "-" if found is None else percent(found)


def operators(summary: Mapping[str, Any]) -> str:
    """One row per call: milliseconds of every method, overlap efficiencies, and the plan behind ``tuned``."""
    times = ("gemm", "nccl", "serial", "async_tp", "pipelined", "fused", "tuned")
    rows = [
        [
            *named(row),
            *(f"{row[f'{method}_ms']:.3f}" for method in times),
            *(efficiency(row, method) for method in ("async_tp", "fused", "tuned")),
            f"{row['tuned_ms'] / row['bound_ms']:.2f}",
            row["tuned_choice"].removeprefix("fused "),
        ]
        for row in summary["rows"]
    ]
    head = ("call", f"m{X}n{X}k", "GEMM", "NCCL", "serial", "async-TP", "pipelined", "fused", "tuned", "E async-TP",
            "E fused", "E tuned", "tuned / bound", "tuned is")  # fmt: skip
    return table(head, rows)


def beside(there: Iterable[Row], here: Iterable[Row]) -> str:
    """Ratios of the calls that are in both runs, which may be of two machines; rows in the order of ``here``."""

    def call(row: Row) -> tuple[str, ...]:
        return (*named(row), row["dtype"])

    earlier, rows = {call(row): row for row in there}, []
    for row in here:
        if call(row) not in earlier:
            continue
        pair = (earlier[call(row)], row)
        rows.append(
            [
                *named(row),
                *(" / ".join(efficiency(one, method) for one in pair) for method in ("async_tp", "fused", "tuned")),
                " / ".join(f"{one['tuned_ms'] / one['gemm_ms']:.3f}" for one in pair),
                *(one["tuned_choice"].removeprefix("fused ") for one in pair),
            ]
        )
    head = ("call", f"m{X}n{X}k", "E async-TP", "E fused", "E tuned", "tuned / GEMM", "tuned there", "tuned here")
    return table(head, rows)
