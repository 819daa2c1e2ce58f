"""Stored results: what their README says is what their data say, and nothing in them names the machine's own paths."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "results"
STAND_IN = RESULTS / "stand-in-8-h200x2"


def test_the_stand_ins_tables_are_those_of_its_data() -> None:
    spec = importlib.util.spec_from_file_location("stand_in_tables", STAND_IN / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (STAND_IN / "README.md").read_text()
    assert tables.rewritten(text) == text, "run results/stand-in-8-h200x2/tables.py"
    assert "NOT a measurement of eight GPUs" in text


def test_the_stand_ins_data_name_no_place() -> None:
    files = [file for file in STAND_IN.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert len(files) > 15
    for file in files:
        assert not re.search(r"/(tmp|work|root|home)/", file.read_text()), file
