"""The list of deliberate faults fits the sources, and the script that puts them in tells caught from let through."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import mutations_faults
finally:
    sys.path.remove(str(SCRIPTS))

FAULTS = mutations_faults.FAULTS


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies_and_has_tests(fault: mutations_faults.Fault, tmp_path: Path) -> None:
    assert mutations_faults.broken(ROOT, fault) is None
    for edit in fault.edits:
        copied = tmp_path / edit.file
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text((ROOT / edit.file).read_text())
    mutations_faults.apply(tmp_path, fault)
    for file in {edit.file for edit in fault.edits}:
        ast.parse((tmp_path / file).read_text())  # a fault and no error of syntax
        assert (tmp_path / file).read_text() != (ROOT / file).read_text()
    assert fault.tests or fault.checks, "nobody has to notice it"
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert name in names_in(ROOT / file), f"no {test}"
    assert set(fault.checks) <= names_in(ROOT / "tests" / "gpu" / "checks.py")


# The script, on a checkout of a few lines.

FAULTS_OF_TWO_LINES = """
FAULTS = tuple(
    Fault(name, (Edit("megatron_flux/sums.py", old, new),), (f"tests/test_sums.py::{test}",))
    for name, old, new, test in (
        ("minus", "a + b", "a - b", "test_small"),
        ("twice b", "a + b", "a + 2 * b", "test_zero"),
        ("a word", "a + b", "a +", "test_small"),
        ("other", "a * b", "a - b", "test_small"),
        ("no test", "a + b", "a - b", "test_nothing"),
        ("left out", "a + b", "a - b", "test_left_out"),
    )
)
"""
TESTS = """
import pytest
from megatron_flux.sums import add

def test_small(): assert add(1, 2) == 3
def test_zero(): assert add(1, 0) == 1
@pytest.mark.skip(reason="not here")
def test_left_out(): assert add(1, 2) == 3
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("mutations.py", "limited.py", "mutations_faults.py"):
        target = tmp_path / "scripts" / name
        target.parent.mkdir(exist_ok=True)
        target.write_text((SCRIPTS / name).read_text())
    with (tmp_path / "scripts" / "mutations_faults.py").open("a") as file:
        file.write(FAULTS_OF_TWO_LINES)
    for name, text in (
        ("megatron_flux/__init__.py", ""),
        ("megatron_flux/sums.py", "def add(a: int, b: int) -> int:\n    return a + b\n"),
        ("tests/test_sums.py", TESTS),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
    ):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
    return tmp_path


def run(checkout: Path, *names: str) -> subprocess.CompletedProcess[str]:
    only = [word for name in names for word in ("--only", name)]
    return subprocess.run(
        [sys.executable, str(checkout / "scripts" / "mutations.py"), "--out", str(checkout / "out.json"), *only],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip


def test_caught_and_let_through(checkout: Path) -> None:
    done = run(checkout, "minus", "twice b", "a word")
    assert done.returncode == 1, done.stderr
    verdicts = {(o["fault"], o["verdict"]) for o in json.loads((checkout / "out.json").read_text())}
    assert verdicts == {
        ("", "passed"),
        ("minus", "caught"),
        ("twice b", "let through"),
        ("a word", "broke with 4"),
    }
    assert "1 of 3 faults caught by all their tests" in done.stdout
    assert "let through: twice b\n    by tests/test_sums.py::test_zero" in done.stderr
    assert "return a + b" in (checkout / "megatron_flux" / "sums.py").read_text(), "the checkout itself stays as it is"
    assert run(checkout, "minus").returncode == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other", "other: fault no longer applies: 'a * b' occurs 0 times in megatron_flux/sums.py, not once"),
        ("no test", "without any fault: broke with 4"),
        ("left out", "without any fault: did not run"),
    ],
)
def test_what_says_nothing_is_an_error(checkout: Path, name: str, said: str) -> None:
    done = run(checkout, name)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import mutations

    return mutations


@pytest.mark.parametrize(
    ("code", "lines", "verdict"),
    [
        (0, [{"ok": True, "said": "fine"}], "passed"),
        (0, [], "did not run"),
        (1, [{"ok": True, "said": "fine"}, {"ok": False, "said": "AssertionError('the sum is another')"}], "caught"),
        (1, [{"ok": False, "said": "CompilationError(...)"}], "broke"),
        (1, [], "broke"),
        (None, [{"ok": False, "said": "timed out"}], "ran too long"),
    ],
)
def test_verdicts_of_checks(script: ModuleType, tmp_path: Path, code: int, lines: list[object], verdict: str) -> None:
    record = tmp_path / "record.jsonl"
    if lines:
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert script._of_checks(code, record, "output")[0] == verdict


def test_pairs_of_gpus(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7,9")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in script._pairs_of_gpus()] == ["3,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SystemExit, match="needs two GPUs of one host, 1 visible"):
        script._pairs_of_gpus()
