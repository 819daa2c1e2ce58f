"""Imports go downwards only, modules form no circle, and folders say what they hold."""

from pathlib import Path

import pytest

from scripts.rooms import ROOMS, Package, room_of

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(REPOSITORY)


def test_no_import_goes_upwards(package: Package) -> None:
    assert package.upward() == []


def test_no_modules_import_each_other(package: Package) -> None:
    assert package.circles() == []


def test_every_folder_has_a_docstring(package: Package) -> None:
    assert package.without_docstring == []


def test_every_room_has_modules(package: Package) -> None:
    assert {room_of(name) for name in package.texts} == set(ROOMS)
