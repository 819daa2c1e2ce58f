"""Candidates are compared by turns of different numbers of rows."""

import math
import random
import statistics

import pytest

from megatron_flux.ops.tuner.effects import Timed, effects_of

pytestmark = pytest.mark.fast


def medians(turns: list[Timed]) -> dict[int, float]:
    return {candidate: statistics.median(found) for candidate, found in effects_of(turns).items()}


@pytest.mark.parametrize("fixed", [0.0, 0.2, 2.0], ids="fixed {}".format)
def test_rows_do_not_decide(fixed: float) -> None:
    """The slower one has the long calls, whose time a row is less; ``fixed`` is what every call takes."""
    turns = [Timed(i, 64, (fixed + 0.064) * ratio) for i, ratio in ((0, 1.0), (1, 1.04))]
    turns += [Timed(0, rows, fixed + 0.001 * rows) for rows in (32, 40, 48)]
    turns += [Timed(1, rows, (fixed + 0.001 * rows) * 1.04) for rows in (100, 120, 128)]
    found = medians(turns)
    assert found[1] - found[0] == pytest.approx(math.log(1.04))


def test_noise_and_an_outlier_do_not_decide() -> None:
    draw = random.Random(3)
    wrong = 0
    for _ in range(200):
        turns = []
        for _ in range(5):
            rows = draw.randrange(2048, 4096)  # a step, whose layers take turns
            for candidate, ratio in ((0, 1.0), (1, 0.93), (2, 1.02)):
                ms = (0.6 + 3e-5 * rows) * ratio * math.exp(draw.gauss(0, 0.02))
                turns.append(Timed(candidate, rows, ms * (20 if draw.random() < 0.05 else 1)))
        found = medians(turns)
        wrong += min(found, key=found.get) != 1  # type: ignore[arg-type]
    assert wrong <= 4


def test_one_candidate_alone() -> None:
    assert medians([Timed(0, rows, 1.0 * rows) for rows in (32, 64)]) == {0: 0.0}
    assert effects_of([]) == {}
