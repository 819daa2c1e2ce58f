"""The sessions that ``scripts/test.sh`` runs side by side have every test between them, and none twice."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_is_in_one_session() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text()
    named = {name: words.split() for name, words in re.findall(r"^([A-Z]+)=\((.*)\)$", script, re.MULTILINE)}
    begun = re.findall(r'-m pytest "\$\{([A-Z]+)\[@\]\}"', script)
    begun.remove("ARGUMENTS")  # the caller's
    folders = [folder for name in begun for folder in named[name]]
    assert len(begun) > 1
    pytests_own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    assert Counter(folders) == Counter(pytests_own)
    found = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    assert found
    assert {file for file in found if sum(file.startswith(f"{folder}/") for folder in folders) != 1} == set()
