"""The patch sets for Megatron-LM source trees, on trees of the shape that each set expects, made from its hunks.

A tree has the lines that the hunks show at the places that they name, and filler between them. The set for 0.16.1 is
also run, in tests/megatron_lm.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import megatron_flux.megatron_lm

SETS = Path(__file__).parents[3] / "patches" / "megatron-lm"
TAGS = ("core_v0.15.3", "core_v0.16.1", "core_v0.19.0")
NAMES = ["0001-arguments", "0002-initialisation", "0003-training-log"]
HUNK = re.compile(r"^@@ -(\d+),\d+ \+\d+,\d+ @@.*$")


def before_and_after(patches: tuple[Path, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """The files that a set changes, before and after; line numbers are those of a tree with the earlier patches."""
    old: dict[str, dict[int, str]] = {}
    new: dict[str, dict[int, list[str]]] = {}
    for patch in patches:
        shift, name, at = 0, "", 0
        for line in patch.read_text().splitlines():
            if line.startswith("+++ b/"):
                name = line.removeprefix("+++ b/")
                shift = sum(len(lines) for lines in new.get(name, {}).values())
            elif match := HUNK.match(line):
                at = int(match[1]) - shift
            elif name and line.startswith("+"):
                new.setdefault(name, {}).setdefault(at - 1, []).append(line[1:])
            elif name and line.startswith((" ", "-")):
                assert line.startswith(" "), "the sets only add lines"
                old.setdefault(name, {})[at] = line[1:]
                at += 1
    first, second = {}, {}
    for name, lines in old.items():
        numbers = range(1, max(lines) + 20)
        filled = [lines.get(number, f"# filler {number}") for number in numbers]
        added = [[line, *new[name].get(number, [])] for number, line in zip(numbers, filled, strict=True)]
        first[name] = "\n".join(filled) + "\n"
        second[name] = "\n".join(line for lines_ in added for line in lines_) + "\n"
    return first, second


def patch_set(tag: str) -> tuple[Path, ...]:
    return tuple(sorted((SETS / tag).glob("*.patch")))


def git_apply(tree: Path, patches: tuple[Path, ...], *options: str) -> None:
    """Run the command of patches/README.md."""
    subprocess.run(["git", "apply", *options, *map(str, patches)], cwd=tree, check=True)


def contents(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): path.read_text() for path in sorted(tree.rglob("*")) if path.is_file()}


def test_the_sets() -> None:
    assert sorted(path.name for path in SETS.iterdir()) == list(TAGS)
    for tag in TAGS:
        assert [path.stem for path in patch_set(tag)] == NAMES


every_set = pytest.mark.parametrize("tag", TAGS)


@every_set
def test_the_sets_call_functions_that_exist(tag: str) -> None:
    text = "".join(path.read_text() for path in patch_set(tag))
    called = set(re.findall(r"^\+.*from megatron_flux\.megatron_lm import (\w+)", text, flags=re.MULTILINE))
    assert called == {"add_arguments", "validate", "install", "log"}
    assert called <= set(megatron_flux.megatron_lm.__all__)


@every_set
def test_apply_and_revert(tag: str, tmp_path: Path) -> None:
    before, after = before_and_after(patch_set(tag))
    for name, text in before.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git_apply(tmp_path, patch_set(tag))
    assert contents(tmp_path) == after
    git_apply(tmp_path, patch_set(tag), "--reverse")
    assert contents(tmp_path) == before
