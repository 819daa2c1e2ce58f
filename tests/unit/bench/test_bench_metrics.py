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
    """Twenty steps, ten of them warm; recording the fifth measured GEMMs, and the tenth was slow."""
    took = {1: None, 6: 900.0, 11: 500.0}
    return [record(n, flux=True, **{"flux/metrics_ms": took.get(n, 0.3)}) for n in range(1, 21)]


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


def test_few_pairs_give_no_interval_and_no_recorded_times_no_share() -> None:
    bare = [{**r, "flux/metrics_ms": None} for r in records()]
    found = summarize(blocks(5, 0.0), bare, warm=10)
    assert found["cost_percent"] == pytest.approx(0)
    assert found["cost_percent_ci95"] is None
    assert found["between_steps_percent"] is None
