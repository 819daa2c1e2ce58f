"""Stored results: generated tables and plans are those of the raw data, and no file names a path of the machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"


def script(path: str) -> ModuleType:
    """Load a script of the results, which are no package."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").replace("-", "_"), RESULTS / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plans_that_ship_are_those_of_the_runs() -> None:
    module, advice = script("shipped-plans/tables"), "run PYTHONPATH=. python results/shipped-plans/tables.py"
    text = module.README.read_text()
    assert module.written(module.shipped(module.calls())) == module.PLANS.read_text(), advice
    assert module.between_marks(text, "plans", module.tables()) == text, advice


def test_data_name_no_path_of_a_machine() -> None:
    files = [file for file in RESULTS.rglob("*") if file.is_file() and file.suffix not in (".png", ".pyc")]
    assert len(files) > 200
    assert not [file for file in files if re.search(r"/(tmp|work|root|home|opt)/", file.read_text())]
