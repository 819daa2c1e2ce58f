"""Synthetic records of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_flux.metrics import JsonlRecorder, summarize, write_summary

Record = dict[str, Any]


def record(iteration: int, *, flux: bool = False, **changes: Any) -> Record:
    """A full record with ``changes`` to its fields."""
    values: Record = {
        "iteration": iteration,
        "lm loss": 5.0 - 0.1 * iteration,
        "grad-norm": 1.5,
        "learning-rate": 1e-3,
        "iteration-time": 0.100,
        "throughput": 400.0,
        "tokens-per-second": 10_000.0,
        "mfu": 0.4,
        "consumed-samples": 8 * iteration,
        "peak-memory-bytes": 2**30,
        "block": 0,
        "warmup": False,
        "flux/active_layers": 8 if flux else 0,
        "flux/all_gather_gemm_calls": 16 if flux else 0,
        "flux/gemm_reduce_scatter_calls": 16 if flux else 0,
        "flux/bytes_received": 4096 if flux else 0,
        "flux/fallback_calls": 0,
        "flux/fallbacks": {},
    }
    return values | changes


def interleaved(pairs: int, times: dict[str, list[float]], per_block: int = 3) -> dict[str, list[Record]]:
    """A B B A blocks; ``times[arm]`` is the step time of each block of that arm, in seconds."""
    arms: dict[str, list[Record]] = {"baseline": [], "flux": []}
    for pair in range(pairs):
        order = ("baseline", "flux") if pair % 2 == 0 else ("flux", "baseline")
        for position, arm in enumerate(order):
            for _ in range(per_block):
                changes = {"iteration-time": times[arm][pair], "block": 2 * pair + position}
                arms[arm].append(record(len(arms[arm]) + 1, flux=arm == "flux", **changes))
    return arms


def write_run(folder: Path, arms: dict[str, list[Record]], info: dict[str, Any]) -> Path:
    """A run folder as compare leaves it, without its report."""
    for arm, records in arms.items():
        with JsonlRecorder(folder / arm / "metrics.jsonl") as recorder:
            for item in records:
                recorder.write(item)
    (folder / "config.json").write_text(json.dumps(info))
    write_summary(folder / "summary.json", summarize(arms["baseline"], arms["flux"], info))
    return folder
