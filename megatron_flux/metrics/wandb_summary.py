"""What a comparison found, as a wandb run shows it: both arms' runs get the same values, named ``compare/*``.

The baseline's exposed communication is not seen in its own steps, where collectives are no calls of an operator. It is
that of flux's calls as collective and GEMM in turn (``flux/serial_time_ms`` - ``flux/gemm_time_ms``), the way stock
runs them in forward; in backward stock hides a part beside the wgrad. Where steps were profiled, what the traces say is
there too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import read_records
from megatron_flux.metrics.statistics import timed
from megatron_flux.metrics.summary import ARMS, read_json_object

BASELINE_EXPOSED = "baseline/exposed_communication_ms"
"""By operator, a curve of flux's run beside its own ``flux/exposed_communication_ms``; ms per iteration."""

_FIGURES = (
    "speedup",
    "paired_blocks",
    "max_relative_loss_difference",
    "max_relative_grad_norm_difference",
    "verdict",
)


def baseline_exposed_ms(record: Mapping[str, Any]) -> dict[str, float]:
    """Of a sampled flux record, by operator, in ms per iteration; empty for any other."""
    serial, gemm = (record.get(f"flux/{part}_time_ms") or {} for part in ("serial", "gemm"))
    return {
        operator: serial[operator] - gemm[operator]
        for operator in serial
        if serial[operator] is not None and gemm.get(operator) is not None
    }


def of_comparison(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """``compare/*`` of a comparison that has ended; null where it is not known.

    Args:
        folder: the run folder, for the records and the breakdowns.
        summary: as :func:`megatron_flux.metrics.summary.summarize` makes it.

    Returns:
        ``speedup``, ``speedup_low`` and ``speedup_high`` (its 95 % interval), ``paired_blocks``, the largest relative
        differences of loss and gradient norm, ``verdict``, and in ms per iteration ``<arm>_exposed_communication_ms/*``
        by operator (median of the sampled steps that are timed) and ``<arm>_exposed_communication_traced_ms``.
    """
    low, high = summary["speedup_ci95"] or (None, None)
    found = {name: summary[name] for name in _FIGURES} | {"speedup_low": low, "speedup_high": high}
    flux = timed(read_records(folder / "flux" / "metrics.jsonl"))
    found |= _medians("baseline_exposed_communication_ms", [baseline_exposed_ms(record) for record in flux])
    own = [record.get("flux/exposed_communication_ms") or {} for record in flux]
    found |= _medians("flux_exposed_communication_ms", own)
    for arm in ARMS:
        found[f"{arm}_exposed_communication_traced_ms"] = _traced(folder / arm / "breakdown.json")
    return {f"compare/{name}": value for name, value in found.items()}


def _medians(name: str, samples: list[dict[str, Any]]) -> dict[str, float]:
    operators = dict.fromkeys(operator for sample in samples for operator in sample)
    known = {operator: [s[operator] for s in samples if s.get(operator) is not None] for operator in operators}
    return {f"{name}/{operator}": statistics.median(values) for operator, values in known.items() if values}


def _traced(file: Path) -> float | None:
    if not file.is_file():
        return None
    try:
        return read_json_object(file).get("parts", {}).get("communication_exposed")
    except UserError:
        return None
