"""The list of deliberate faults fits the sources and the tests."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    import mutations_faults
finally:
    sys.path.remove(str(ROOT / "scripts"))

FAULTS = mutations_faults.FAULTS


@functools.cache
def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_has_tests(fault: mutations_faults.Fault, tmp_path: Path) -> None:
    assert mutations_faults.broken(ROOT, fault) is None
    copied = tmp_path / fault.file
    copied.parent.mkdir(parents=True)
    copied.write_text((ROOT / fault.file).read_text())
    mutations_faults.apply(tmp_path, fault)
    ast.parse(copied.read_text())  # a fault and no error of syntax
    assert copied.read_text() != (ROOT / fault.file).read_text()
    assert fault.tests or fault.checks, "nobody has to notice it"
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name in names_in(ROOT / file), f"no {test}"
    assert set(fault.checks) <= names_in(ROOT / "tests" / "gpu" / "checks.py")
