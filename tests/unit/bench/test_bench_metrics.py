"""The figures of ``bench metrics`` from blocks and records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flux.bench.metrics_cost import summarize
from tests.unit.metrics.metrics_records import record


def blocks(pairs: int, cost: float) -> list[dict[str, Any]]:
    """Blocks of ten steps of 100 ms, drifting by 1 % a pair; recorded ones take ``cost`` longer, and twice that in
    processor time.
    """
    made = []
    for pair in range(pairs):
        for kind in ("bare", "recorded") if pair % 2 == 0 else ("recorded", "bare"):
            more = cost if kind == "recorded" else 0.0
            drift = 1 + 0.01 * pair
            times = {"seconds": drift * (1 + more), "cpu_seconds": 2 * drift * (1 + 2 * more)}
            made.append({"block": len(made), "kind": kind, "steps": 10, **times})
    return made


def records() -> list[dict[str, Any]]:
    """Twenty steps, ten of them warm; every fifth is sampled and takes 2 ms more; the first sample measured GEMMs."""
    made = []
    for n in range(1, 21):
        sampled = n % 5 == 0
        took = None if n == 1 else 900.0 if n == 6 else 0.3
        times = {"iteration-time": 0.102 if sampled else 0.100, "flux/sampled": sampled, "flux/metrics_ms": took}
        made.append(record(n, flux=True, **times))
    return made


def test_cost_is_told_by_wall_and_processor_time() -> None:
    found = summarize(blocks(8, 0.01), records(), warm=10)
    assert found["cost_percent"] == pytest.approx(1)
    assert found["cpu_cost_percent"] == pytest.approx(2)
    low, high = found["cost_percent_ci95"]
    assert low <= 1.0001
    assert high >= 0.9999
    assert found["bare_ms"] == pytest.approx(103.5)
    assert found["recorded_cpu_ms"] == pytest.approx(2 * 103.5 * 1.02)
    assert found["between_steps_ms"] == {"median": 0.3, "mean": pytest.approx(0.3)}
    assert found["between_steps_percent"] == pytest.approx(100 * 0.3 / (103.5 * 1.01))
    assert (found["sampled_step_ms"], found["other_step_ms"]) == (pytest.approx(102), pytest.approx(100))
    assert found["first_sample_ms"] == 900


def test_few_pairs_give_no_interval_and_no_samples_no_figures() -> None:
    bare = [{**r, "flux/sampled": False, "flux/metrics_ms": None} for r in records()]
    found = summarize(blocks(5, 0.0), bare, warm=10)
    assert found["cost_percent"] == pytest.approx(0)
    assert found["cost_percent_ci95"] is None
    assert found["sampled_step_ms"] is None
    assert found["first_sample_ms"] is None
    assert found["between_steps_percent"] is None
