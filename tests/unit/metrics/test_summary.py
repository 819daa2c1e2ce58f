"""The summary: figures from known records, and what it makes of records that are not normal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.summary import (
    MIN_PAIRED_BLOCKS,
    largest,
    paired_blocks,
    relative_difference,
    spread,
    summarize,
    write_summary,
)
from tests.unit.metrics.metrics_records import Record, interleaved, record


def arm(times: list[float], *, flux: bool = False) -> list[Record]:
    return [record(n, flux=flux, **{"iteration-time": time}) for n, time in enumerate(times, 1)]


def test_figures_of_an_arm() -> None:
    times = [n / 1000 for n in range(1, 12)]
    records = arm(times)
    records[3] |= {"peak-memory-bytes": 3 * 2**30, "tokens-per-second": 1.0}
    figures = summarize(records, [], {})["arms"]["baseline"]
    assert figures["step_time_ms"] == pytest.approx({"median": 6.0, "p10": 2.0, "p90": 10.0, "n": 11})
    assert figures["tokens_per_second"] == 10_000
    assert figures["tflops_per_gpu"] == 400
    assert figures["mfu"] == 0.4
    assert figures["peak_memory_bytes"] == 3 * 2**30
    assert figures["first_loss"] == records[0]["lm loss"]
    assert figures["final_loss"] == records[-1]["lm loss"]


def test_speedup_is_the_ratio_of_medians() -> None:
    summary = summarize(arm([0.1, 0.2, 0.9]), arm([0.1, 0.1, 0.4], flux=True), {})
    assert summary["speedup"] == pytest.approx(2.0)


def test_warmup_is_left_out_of_timing_only() -> None:
    flux = arm([9.0, 0.1, 0.1], flux=True)
    flux[0] |= {"warmup": True, "tokens-per-second": 1.0, "lm loss": 50.0, "peak-memory-bytes": 2**40}
    flux[0] |= {"flux/active_layers": 0}
    summary = summarize(arm([0.1] * 3), flux, {})
    figures = summary["arms"]["flux"]
    assert figures["step_time_ms"] == pytest.approx({"median": 100, "p10": 100, "p90": 100, "n": 2})
    assert figures["tokens_per_second"] == 10_000
    assert figures["first_loss"] == 50.0
    assert figures["peak_memory_bytes"] == 2**40
    assert summary["max_relative_loss_difference"] == pytest.approx((50 - 4.9) / 4.9)
    assert summary["flux_active_layers"] == 8


def test_differences_are_relative_to_the_baseline() -> None:
    flux = arm([0.1] * 3, flux=True)
    flux[1] |= {"lm loss": 4.8 * (1 - 1e-4), "grad-norm": 1.5 * 1.02}
    summary = summarize(arm([0.1] * 3), flux, {})
    assert summary["max_relative_loss_difference"] == pytest.approx(1e-4)
    assert summary["max_relative_grad_norm_difference"] == pytest.approx(0.02)
    assert summary["compared_iterations"] == 3


@pytest.mark.parametrize(
    ("baseline", "flux", "expected"),
    [
        (2.0, 2.0, 0.0),
        (-2.0, -1.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, 1e-9, math.inf),
        (math.nan, math.nan, math.nan),
        (1.0, math.nan, math.nan),
        (math.inf, math.inf, math.nan),
        (1.0, -math.inf, math.nan),
    ],
)
def test_relative_difference(baseline: float, flux: float, expected: float) -> None:
    assert relative_difference(baseline, flux) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("order", [1, -1])
def test_largest_does_not_drop_a_nan(order: int) -> None:
    assert math.isnan(largest([(1, 0.5), (2, math.nan), (3, 0.1)][::order]))


def test_nan_loss_surfaces() -> None:
    flux = arm([0.1] * 4, flux=True)
    flux[1]["lm loss"] = math.nan
    summary = summarize(arm([0.1] * 4), flux, {})
    assert summary["max_relative_loss_difference"] == "NaN"
    assert summary["arms"]["flux"]["non_finite_losses"] == 1
    assert summary["arms"]["flux"]["first_non_finite_loss"] == 2
    assert summary["arms"]["baseline"]["non_finite_losses"] == 0
    assert any("flux loss is not finite in 1 of 4" in note for note in summary["notes"])
    assert "flux loss is not finite" in summary["verdict"]


def test_zero_baseline_loss() -> None:
    baseline, flux = arm([0.1]), arm([0.1], flux=True)
    baseline[0]["lm loss"] = 0.0
    assert summarize(baseline, flux, {})["max_relative_loss_difference"] == "Infinity"
    flux[0]["lm loss"] = 0.0
    assert summarize(baseline, flux, {})["max_relative_loss_difference"] == 0


@pytest.mark.parametrize("empty", ["baseline", "flux", "both"])
def test_empty_arms(empty: str) -> None:
    baseline = [] if empty != "flux" else arm([0.1])
    flux = [] if empty != "baseline" else arm([0.1], flux=True)
    summary = summarize(baseline, flux, {})
    assert summary["speedup"] is None
    assert summary["speedup_ci95"] is None
    assert summary["max_relative_loss_difference"] is None
    for name in ["baseline", "flux"] if empty == "both" else [empty]:
        assert summary["arms"][name]["step_time_ms"] == {"median": None, "p10": None, "p90": None, "n": 0}
        assert summary["arms"][name]["final_loss"] is None
        assert f"The {name} arm has no records." in summary["notes"]
        assert name in summary["verdict"]
    assert summary["flux_active_layers"] == (8 if flux else None)


def test_warmup_only() -> None:
    flux = arm([0.1], flux=True)
    flux[0]["warmup"] = True
    summary = summarize(arm([0.1]), flux, {})
    assert summary["speedup"] is None
    assert summary["flux_active_layers"] == 8
    assert any("warm-up steps only" in note for note in summary["notes"])


def test_arms_of_different_length_compare_what_both_have() -> None:
    flux = arm([0.1] * 3, flux=True)
    summary = summarize(arm([0.1] * 5), flux, {})
    assert summary["compared_iterations"] == 3
    assert any("5 iterations and flux 3" in note for note in summary["notes"])
    assert summarize(arm([0.1] * 3), flux, {})["notes"] == []


def test_active_layers_are_the_fewest() -> None:
    flux = arm([0.1] * 3, flux=True)
    flux[1]["flux/active_layers"] = 2
    assert summarize([], flux, {})["flux_active_layers"] == 2


@pytest.mark.parametrize("said", [True, False])
def test_fallbacks_of_all_starts_are_counted(said: bool) -> None:
    """26 calls a step, in three starts of which the second begins with as many as the first had."""
    flux = arm([0.1] * 4, flux=True)
    for item, steps in zip(flux, [1, 2, 2 if said else 1, 1], strict=True):
        item["flux/fallbacks"] = {"fp8": 26 * steps} | ({"tp": 1} if steps == 2 else {})
    if said:
        for n in (0, 2, 3):
            flux[n]["flux/run"] = {"arm": "flux"}
    assert summarize([], flux, {})["flux_fallbacks"] == {"fp8": 26 * (5 if said else 3), "tp": 1 + said}


def test_patched_baseline_is_told() -> None:
    summary = summarize(arm([0.1], flux=True), arm([0.1], flux=True), {})
    assert summary["baseline_is_stock"] is False
    assert "baseline ran flux" in summary["verdict"]
    assert summarize(arm([0.1]), arm([0.1], flux=True), {})["baseline_is_stock"] is True


def test_spread_of_nothing_and_of_one() -> None:
    assert spread([]) == {"median": None, "p10": None, "p90": None, "n": 0}
    assert spread([2.0]) == {"median": 2.0, "p10": 2.0, "p90": 2.0, "n": 1}


def test_blocks_pair_in_order_and_warmup_blocks_do_not_shift_them() -> None:
    arms = interleaved(3, {"baseline": [1, 2, 3], "flux": [10, 20, 30]}, per_block=1)
    assert paired_blocks(arms["baseline"], arms["flux"]) == [([1], [10]), ([2], [20]), ([3], [30])]
    arms["flux"][0]["warmup"] = True
    assert paired_blocks(arms["baseline"], arms["flux"]) == [([2], [20]), ([3], [30])]
    assert paired_blocks(arms["baseline"], arms["flux"][:2]) == [([2], [20])]


def noisy(pairs: int, speedup: float) -> dict[str, list[Record]]:
    drift = 0.1 + 0.001 * np.random.default_rng(3).standard_normal(2 * pairs)
    times = {"baseline": list(drift[::2]), "flux": list(drift[1::2] / speedup)}
    return interleaved(pairs, {name: [float(value) for value in values] for name, values in times.items()})


def test_interval_holds_a_real_speedup_and_is_repeatable() -> None:
    arms = noisy(10, 1.2)
    summary = summarize(arms["baseline"], arms["flux"], {})
    low, high = summary["speedup_ci95"]
    assert 1.15 < low < summary["speedup"] < high < 1.25
    assert summary["verdict"].endswith("faster")
    assert summarize(arms["baseline"], arms["flux"], {}) == summary


def test_interval_without_a_speedup_includes_one() -> None:
    arms = noisy(10, 1.0)
    summary = summarize(arms["baseline"], arms["flux"], {})
    low, high = summary["speedup_ci95"]
    assert low < 1 < high
    assert "no difference measured" in summary["verdict"]


def test_interval_draws_pairs_not_steps() -> None:
    # Machine drift is shared by a pair: every pair says exactly 1.1, so there is no uncertainty about the ratio's sign
    # although the times of one arm vary tenfold.
    times = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    arms = interleaved(6, {"baseline": times, "flux": [time / 1.1 for time in times]})
    assert summarize(arms["baseline"], arms["flux"], {})["speedup_ci95"] == pytest.approx([1.1, 1.1])


def test_too_few_blocks_give_no_interval() -> None:
    enough, few = noisy(MIN_PAIRED_BLOCKS, 1.2), noisy(MIN_PAIRED_BLOCKS - 1, 1.2)
    assert summarize(enough["baseline"], enough["flux"], {})["speedup_ci95"] is not None
    summary = summarize(few["baseline"], few["flux"], {})
    assert summary["speedup_ci95"] is None
    assert summary["speedup"] > 1.1
    assert "no interval" in summary["verdict"]
    assert "faster" not in summary["verdict"]


INFO: dict[str, Any] = {
    "versions": {"torch": "2.13"},
    "device": {"name": "cpu"},
    "layout": {"tp": 2},
    "command": "megatron-flux compare",
    "config": {"path": Path("data")},
}


def test_info_is_taken_over_and_the_file_is_strict_json(tmp_path: Path) -> None:
    baseline = arm([0.1])
    baseline[0]["lm loss"] = math.inf
    summary = summarize(baseline, arm([0.1], flux=True), INFO)
    assert summary["schema_version"] == 3
    assert {name: summary[name] for name in ("versions", "device", "layout", "command")} == {
        name: INFO[name] for name in ("versions", "device", "layout", "command")
    }
    json.dumps(summary, allow_nan=False)
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert "Infinity" in (tmp_path / "summary.json").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_summary_that_cannot_be_written() -> None:
    with pytest.raises(UserError, match="cannot write"):
        write_summary(Path("/dev/null/missing/summary.json"), {})


def test_the_last_validation_and_the_most_host_memory() -> None:
    records = [record(n) for n in range(1, 5)]
    records[1] |= {"lm loss validation": 3.5, "flux/host_memory_bytes": 2**30}
    records[2] |= {"lm loss validation": 3.25, "flux/host_memory_bytes": 2**29}
    arms = summarize(records, [record(n) for n in range(1, 5)], {})["arms"]
    assert (arms["baseline"]["final_validation_loss"], arms["baseline"]["host_memory_bytes"]) == (3.25, 2**30)
    assert (arms["flux"]["final_validation_loss"], arms["flux"]["host_memory_bytes"]) == (None, None)
