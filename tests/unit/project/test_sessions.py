"""The sessions that ``scripts/test.sh`` runs side by side have every test between them, and none twice."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_is_in_one_session() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text()
    begun = re.findall(r'-m pytest "\$\{([A-Z]+)\[@\]\}"', script)
    begun.remove("ARGUMENTS")  # the caller's
    assert len(begun) > 1
    lists = "\n".join(re.findall(r"^[A-Z]+=\(.*\).*$", script, re.MULTILINE))
    found = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    pytests_own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"]
    assert found == in_session(pytests_own, found)
    sessions = [in_session(words_of(lists, name), found) for name in begun]
    assert set.union(*sessions) == found
    assert sum(map(len, sessions)) == len(found), "a test is in two sessions"


def words_of(lists: str, name: str) -> list[str]:
    """What pytest is given, as the shell makes it of the lists."""
    words = f'{lists}\nprintf "%s\\n" "${{{name}[@]}}"'
    return subprocess.run(["bash", "-euc", words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def in_session(words: list[str], found: set[str]) -> set[str]:
    """The files that a session of these words collects."""
    ignored = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
    named = [word for word in words if not word.startswith("--ignore=")]
    assert ignored <= found
    assert all((ROOT / word).exists() for word in named), named
    return {file for file in found - ignored if any(file == word or file.startswith(f"{word}/") for word in named)}
