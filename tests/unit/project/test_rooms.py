"""Imports go downwards only, and modules form no circle: ``python -m scripts.rooms`` says more."""

from pathlib import Path

from scripts.rooms import Package


def test_no_import_goes_upwards_or_in_a_circle() -> None:
    package = Package(Path(__file__).parents[3])
    assert (package.upward(), package.circles()) == ([], [])
