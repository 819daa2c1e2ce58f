"""The summary: figures from known records, and what it makes of records that are not normal."""

import math
from itertools import product

import numpy as np
import pytest

from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.metrics.summary import (
    largest,
    relative_difference,
    speedup_interval,
    summarize,
)
from tests.unit.metrics.metrics_records import Record, record


def variant(times: list[float], *, flux: bool = False) -> list[Record]:
    return [record(n, flux=flux, **{"iteration-time": time}) for n, time in enumerate(times, 1)]


def test_warmup_and_profiled_steps_are_left_out_of_timing_only() -> None:
    flux = variant([9.0, 0.1, 0.1, 50.0], flux=True)
    flux[0] |= {"warmup": True, "tokens-per-second": 1.0, "lm loss": 50.0, "peak-memory-bytes": 2**40}
    flux[0] |= {"flux/active_layers": 0}
    flux[3] |= {"profiled": True}
    summary = summarize(variant([0.1] * 4), flux, {})
    figures = summary["arms"]["flux"]
    assert figures["step_time_ms"] == pytest.approx({"median": 100, "p10": 100, "p90": 100, "n": 2})
    assert (figures["tokens_per_second"], figures["first_loss"]) == (10_000, 50.0)
    assert figures["peak_memory_bytes"] == 2**40
    assert summary["max_relative_loss_difference"] == pytest.approx((50 - 4.9) / 4.9)
    assert summary["flux_active_layers"] == 8
    # Medians, and the fewest layers.
    flux = variant([0.1, 0.1, 0.4], flux=True)
    flux[1] |= {"grad-norm": 1.5 * 1.02, "flux/active_layers": 2}
    summary = summarize(variant([0.1, 0.2, 0.9]), flux, {})
    assert summary["speedup"] == pytest.approx(2.0)
    assert summary["max_relative_grad_norm_difference"] == pytest.approx(0.02)
    assert (summary["compared_iterations"], summary["flux_active_layers"]) == (3, 2)


@pytest.mark.parametrize(
    ("baseline", "flux", "expected"),
    [
        (-2.0, -1.0, 0.5),
        (0.0, 0.0, 0.0),
        (0.0, 1e-9, math.inf),
        (math.nan, math.nan, math.nan),
        (1.0, math.nan, math.nan),
        (math.inf, math.inf, math.nan),
    ],
)
def test_relative_difference(baseline: float, flux: float, expected: float) -> None:
    assert relative_difference(baseline, flux) == pytest.approx(expected, nan_ok=True)
    for differences in ([(1, expected), (2, 0.1)], [(1, 0.1), (2, expected)]):
        assert math.isnan(largest(differences)) == math.isnan(expected), "max alone may drop a NaN"


def test_loss_that_is_not_finite() -> None:
    flux = variant([0.1] * 4, flux=True)
    flux[1]["lm loss"] = math.nan
    summary = summarize(variant([0.1] * 4), flux, {})
    assert summary["max_relative_loss_difference"] == "NaN"
    found = [summary["arms"]["flux"][name] for name in ("non_finite_losses", "first_non_finite_loss")]
    assert (found, summary["arms"]["baseline"]["non_finite_losses"]) == ([1, 2], 0)
    assert any("flux loss is not finite in 1 of 4" in note for note in summary["notes"])
    assert "flux loss is not finite" in summary["verdict"]


def test_fallbacks_of_all_starts_are_counted() -> None:
    """26 calls a step, in three starts of which the second begins with as many as the first had."""
    flux = variant([0.1] * 4, flux=True)
    for item, steps in zip(flux, [1, 2, 2, 1], strict=True):
        item["flux/fallbacks"] = {"fp8": 26 * steps} | ({"tp": 1} if steps == 2 else {})
    for n in (0, 2, 3):
        flux[n]["flux/run"] = {"arm": "flux"}
    assert summarize([], flux, {})["flux_fallbacks"] == {"fp8": 26 * 5, "tp": 2}


def test_secrets_are_found_by_name_at_any_depth() -> None:
    config = {
        **{"API_KEY": 1, "hf_Token": 1, "clientSecret": 1, "db_password": 1, "tokenizer": "bytes"},
        "list": [{"passwd": 1, "kept": 2}],
        "nested": {"deeper": {"credentials": 1, "kept": 3}},
    }
    expected = {"tokenizer": "bytes", "list": [{"kept": 2}], "nested": {"deeper": {"kept": 3}}}
    assert without_secrets(config) == expected


BASELINE = [1.0, 1.13, 1.31, 1.59, 2.03, 2.57]
FLUX = [0.97, 1.19, 1.01, 1.07, 0.89, 1.11]


def test_the_interval_is_a_95_percent_one() -> None:
    """All 6^6 draws of six pairs of one step each: 2.5 % of their ratios lie on either side."""
    pairs = [([b], [f]) for b, f in zip(BASELINE, FLUX, strict=True)]
    found = speedup_interval(pairs)
    assert found is not None
    assert speedup_interval(pairs) == found
    draws = np.array(list(product(range(6), repeat=6)))
    ratios = np.median(np.array(BASELINE)[draws], axis=1) / np.median(np.array(FLUX)[draws], axis=1)
    tolerance = 0.008  # of 2000 draws: more than two standard deviations
    for side, value in ((-1, found[0]), (1, found[1])):
        assert np.mean(side * ratios > side * value + 1e-9) <= 0.025 + tolerance
        assert np.mean(side * ratios >= side * value - 1e-9) >= 0.025 - tolerance
    for side, value in ((-1, np.quantile(ratios, 0.05)), (1, np.quantile(ratios, 0.95))):  # as 90 % would have it
        assert np.mean(side * ratios > side * value + 1e-9) > 0.025 + tolerance
