"""Stored results: what their READMEs say is what their data say, and nothing in them names the machine's own paths."""

from __future__ import annotations

import gzip
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

RESULTS = Path(__file__).parents[2] / "results"
STAND_IN = RESULTS / "stand-in-8-h200x2"
FOLDERS = (
    "layer-h200x4-ahead",
    "layer-h200x4-more",
    "ops-h200x4-sustained",
    "stand-in-8-h200x2-ahead",
    "power-h200",
    "parity-h200x4-dp",
)


def script(path: Path) -> ModuleType:
    """A script of the results, which are no package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_ins_tables_are_those_of_its_data() -> None:
    text = (STAND_IN / "README.md").read_text()
    assert script(STAND_IN / "tables.py").rewritten(text) == text, "run results/stand-in-8-h200x2/tables.py"


def test_the_script_knows_these_folders() -> None:
    assert sorted(script(RESULTS / "tables.py").FOLDERS) == sorted(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_tables_are_those_of_the_data(folder: str) -> None:
    text = (RESULTS / folder / "README.md").read_text()
    assert script(RESULTS / "tables.py").rewritten(folder, text) == text, f"run results/tables.py {folder}"
    assert "| --- |" in text.partition("tables.py: begin")[2].partition("tables.py: end")[0]


@pytest.mark.parametrize("folder", [STAND_IN.name, "stand-in-8-h200x2-ahead"])
def test_a_stand_in_says_what_it_is(folder: str) -> None:
    assert "NOT a measurement of eight GPUs" in (RESULTS / folder / "README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_listed(folder: str) -> None:
    assert f"| `{folder}/` |" in (RESULTS / "README.md").read_text()


@pytest.mark.parametrize(
    ("folder", "least"),
    [
        (STAND_IN.name, 15),
        ("layer-h200x4-ahead", 25),
        ("layer-h200x4-more", 35),
        ("ops-h200x4-sustained", 10),
        ("stand-in-8-h200x2-ahead", 25),
        ("power-h200", 1),
        ("parity-h200x4-dp", 1),
    ],
)
def test_data_name_no_place(folder: str, least: int) -> None:
    files = [file for file in (RESULTS / folder).rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert len(files) > least
    for file in files:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
        assert not re.search(r"/(tmp|work|root|home|opt)/", text), file
