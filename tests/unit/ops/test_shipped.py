"""The file of plans that ship with the package."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("triton")

tables = importlib.import_module("results.shipped-plans.tables")


def test_the_raw_files_give_what_ships() -> None:
    assert tables.written(tables.shipped(tables.calls())) == tables.PLANS.read_text()
    assert tables.tables() in tables.README.read_text()
