"""The interval of the speed-up against the whole distribution that its bootstrap draws from."""

from itertools import product

import numpy as np

from megatron_flux.metrics.summary import speedup_interval

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
