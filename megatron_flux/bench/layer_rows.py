"""Rows of ``bench layer``'s summary. What a figure means is said in :mod:`megatron_flux.bench.layer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_flux.bench.layer_arms import Arm
from megatron_flux.bench.layer_config import Workload
from megatron_flux.bench.rounds import Samples, quartiles


def row(
    workload: Workload,
    arm: Arm,
    samples: Samples,
    agreement: Mapping[str, Any] | None,
    *,
    breakdown: Mapping[str, float] | None = None,
    trace: str | None = None,
) -> dict[str, Any]:
    """One arm's row, without what compares it with others (:func:`complete` adds that)."""
    low, median, high = (value / workload.layers for value in quartiles(samples.step_ms))
    facts = dict(arm.facts)
    peak = facts.pop("peak_memory_gb", None)
    return {
        "model": workload.model,
        "seq": workload.seq,
        "micro_batch": workload.micro_batch,
        "layers": workload.layers,
        "arm": arm.name,
        "training": arm.training,
        "ms_per_layer": round(median, 4),
        "ms_per_layer_low": round(low, 4),
        "ms_per_layer_high": round(high, 4),
        "rounds": len(samples.step_ms),
        "speedup_vs_te": None,
        "hidden_share": None,
        "host_ms_per_step": round(quartiles(samples.host_ms)[1], 3),
        "sm_clock_mhz": _clock(samples),
        "throttle_reasons": sorted({reason for reasons in samples.throttle_reasons for reason in reasons}),
        "peak_memory_gb": None if peak is None else round(peak, 3),
        "breakdown": dict(breakdown or {}),
        "trace": trace,
        "agreement": None if agreement is None else dict(agreement),
        **facts,
    }


def _clock(samples: Samples) -> float | None:
    """Median over the rounds that know it."""
    known = [clock for clock in samples.sm_clock_mhz if clock is not None]
    return quartiles(known)[1] if known else None


def complete(rows: list[dict[str, Any]]) -> None:
    """Fill in ``speedup_vs_te`` and ``hidden_share`` of one workload's rows, where their arms are there."""
    by_arm = {r["arm"]: r["ms_per_layer"] for r in rows}
    te, floor = by_arm.get("te"), by_arm.get("floor")
    if te is None:
        return
    for r in rows:
        r["speedup_vs_te"] = round(te / r["ms_per_layer"], 4)
        if floor is not None and floor < te:
            r["hidden_share"] = round((te - r["ms_per_layer"]) / (te - floor), 4)
