"""The patch sets and ``megatron-flux patch-source``, on trees of the shape that each set expects, made from its hunks.

A tree has the lines that the hunks show at the places that they name, and filler between them: what the tool does to a
tree can be seen, only not run. The set for 0.16.1 is also run, in tests/megatron_lm.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import megatron_flux.megatron_lm
from megatron_flux import UserError
from megatron_flux.cli import main as cli
from megatron_flux.megatron_lm import source_patches
from megatron_flux.megatron_lm.source_patches import apply, examine, patch_sets, revert

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


def write(folder: Path, files: dict[str, str], version: str) -> Path:
    major, minor, patch = version.split(".")
    info = f'MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ""\n'
    for name, text in {**files, "megatron/core/package_info.py": info}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}


every_set = pytest.mark.parametrize("tag", TAGS)


@pytest.fixture
def tag() -> str:
    """Of the set with which what does not depend on the set is tried."""
    return TAGS[1]


@pytest.fixture
def tree(tag: str, tmp_path: Path) -> Path:
    return write(tmp_path / "tree", before_and_after(patch_sets()[tag])[0], tag.removeprefix("core_v"))


def states(tree: Path) -> list[str]:
    return [patch.state for patch in examine(tree).patches]


def test_the_sets() -> None:
    assert tuple(patch_sets()) == TAGS
    for patches in patch_sets().values():
        assert [path.stem for path in patches] == NAMES


@every_set
def test_the_sets_call_functions_that_exist(tag: str) -> None:
    text = "".join(path.read_text() for path in patch_sets()[tag])
    called = set(re.findall(r"^\+.*from megatron_flux\.megatron_lm import (\w+)", text, flags=re.MULTILINE))
    assert called == {"add_arguments", "validate", "install", "log"}
    assert called <= set(megatron_flux.megatron_lm.__all__)


@every_set
def test_apply_and_revert(tag: str, tree: Path) -> None:
    before = contents(tree)
    assert states(tree) == ["applies"] * 3
    assert contents(tree) == before
    apply(tree)
    patched = contents(tree)
    assert {name: patched[name].decode() for name in before if before[name] != patched[name]} == before_and_after(
        patch_sets()[tag]
    )[1]
    assert states(tree) == ["applied"] * 3
    apply(tree)
    assert contents(tree) == patched
    revert(tree)
    assert contents(tree) == before
    revert(tree)
    assert contents(tree) == before


def test_a_tree_with_some_patches_gets_the_others_and_loses_all(tag: str, tree: Path, tmp_path: Path) -> None:
    before = contents(tree)
    apply(tree)
    patched = contents(tree)
    revert(tree)
    only = write(tmp_path / "some", before_and_after(patch_sets()[tag][:1])[1], tag.removeprefix("core_v"))
    shutil.copy(only / "megatron/training/arguments.py", tree / "megatron/training/arguments.py")
    assert states(tree) == ["applied", "applies", "applies"]
    some = contents(tree)
    apply(tree)
    assert contents(tree) == patched
    for name, data in some.items():
        (tree / name).write_bytes(data)
    revert(tree)
    assert contents(tree) == before


def test_lines_may_have_moved_and_other_lines_changed(tree: Path) -> None:
    path = tree / "megatron/training/training.py"
    path.write_text("# a team's own line\n" * 30 + path.read_text().replace("# filler 9\n", "changed = True\n"))
    before = contents(tree)
    apply(tree)
    assert states(tree) == ["applied"] * 3
    revert(tree)
    assert contents(tree) == before


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("action", [apply, revert])
def test_a_changed_tree_is_told_which_hunk_and_kept(
    tree: Path, action: object, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: found(name) if name == tool else None)
    if found(tool) is None:
        pytest.skip(f"{tool} is not installed")
    path = tree / "megatron/training/training.py"
    path.write_text(path.read_text().replace("    return report_memory_flag\n", "    return memory_was_reported\n"))
    before = contents(tree)
    state = examine(tree).patches
    assert [patch.state for patch in state] == ["applies", "applies", "conflicts"]
    assert len(state[2].rejected) == 1
    assert state[2].rejected[0].startswith("megatron/training/training.py, hunk '@@ -")
    with pytest.raises(
        UserError, match=r"0003-training-log of core_v.* does not fit .*training\.py, hunk '@@"
    ) as error:
        action(tree)
    assert "nothing was changed" in str(error.value)
    assert contents(tree) == before


def test_a_patched_line_changed_by_hand_is_a_conflict(tree: Path) -> None:
    apply(tree)
    path = tree / "megatron/training/training.py"
    path.write_text(path.read_text().replace("        install(args)\n", "        install(args)  # ours\n"))
    assert states(tree) == ["applied", "conflicts", "applied"]
    before = contents(tree)
    with pytest.raises(UserError, match="0002-initialisation"):
        revert(tree)
    assert contents(tree) == before


@every_set
def test_without_git_patch_does_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "git" else found(name))
    before = contents(tree)
    apply(tree)
    assert states(tree) == ["applied"] * 3
    revert(tree)
    assert contents(tree) == before


def test_without_either_it_says_so(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="neither git nor patch is installed"):
        examine(tree)


def test_a_repository_around_the_temporary_folder_does_not_matter(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = tmp_path / "repository"
    (around / "tmp").mkdir(parents=True)
    (around / ".git").mkdir()
    (around / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (around / ".git" / "objects").mkdir()
    (around / ".git" / "refs").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(around / "tmp"))
    monkeypatch.setenv("GIT_DIR", str(around / ".git"))
    assert states(tree) == ["applies"] * 3


def test_a_failing_write_takes_back_what_was_written(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(tree)
    write_bytes = Path.write_bytes
    written: list[Path] = []

    def full(self: Path, data: bytes) -> int:
        if self.is_relative_to(tree):
            written.append(self)
            if len(written) == 2:
                raise OSError("no space left on device")
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="no space left on device; nothing was changed"):
        apply(tree)
    assert len(written) == 4
    assert contents(tree) == before


def test_a_tree_without_permission_to_write(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    with pytest.raises(UserError, match=r"no permission to write megatron/training/arguments\.py"):
        apply(tree)


def test_a_release_of_the_same_line_takes_the_set(tmp_path: Path) -> None:
    tree = write(tmp_path, before_and_after(patch_sets()["core_v0.19.0"])[0], "0.19.2")
    assert examine(tree).tag == "core_v0.19.0"


@pytest.mark.parametrize("version", ["0.14.0", "0.17.1", "0.20.0"])
def test_a_version_without_a_set_is_refused_with_those_there_are(tmp_path: Path, version: str) -> None:
    with pytest.raises(UserError, match=r"core_v0\.15\.3, core_v0\.16\.1, core_v0\.19\.0") as error:
        examine(write(tmp_path, {}, version))
    assert f"no patch set for Megatron-LM {version}" in str(error.value)


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a Megatron-LM source tree"):
        examine(tmp_path)
    with pytest.raises(UserError, match="is not a Megatron-LM source tree"):
        examine(Path(__file__))
    with pytest.raises(UserError, match=r"has no megatron/training/arguments\.py, megatron/training/training\.py"):
        examine(write(tmp_path, {}, "0.16.1"))
    (tmp_path / "megatron/core/package_info.py").write_text("VERSION = 1\n")
    with pytest.raises(UserError, match=r"the version of Megatron-LM cannot be told: .* does not assign MAJOR"):
        examine(tmp_path)


def test_an_installed_package_finds_its_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip installs them: under the data folder, listed in RECORD."""
    share = tmp_path / "share" / "megatron-flux" / "patches" / "megatron-lm"
    shutil.copytree(patch_sets()[TAGS[0]][0].parents[1], share)
    site = tmp_path / "lib" / "site-packages"
    info = site / "megatron_flux-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-flux\nVersion: 1\n")
    listed = [os.path.relpath(path, site) for path in sorted(share.rglob("*.patch"))]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in listed))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(source_patches, "__file__", str(site / "megatron_flux" / "megatron_lm" / "source_patches.py"))
    assert tuple(patch_sets()) == TAGS
    assert all(share in path.parents for patches in patch_sets().values() for path in patches)


def test_every_set_is_part_of_the_package() -> None:
    import tomllib

    root = Path(__file__).parents[3]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    assert sorted(listed) == [f"share/megatron-flux/patches/megatron-lm/{tag}" for tag in TAGS]
    for patterns in listed.values():
        assert [list(root.glob(pattern)) for pattern in patterns] != [[]]


def test_the_command(tree: Path, tag: str) -> None:
    def call(word: str) -> list[str]:
        done = CliRunner().invoke(cli.app, ["patch-source", word, str(tree)], catch_exceptions=False)
        assert done.exit_code == 0
        lines = done.output.splitlines()
        assert lines[0] == f"{tree}: Megatron-LM {tag.removeprefix('core_v')}, patches for {tag}"
        return [line.strip() for line in lines[1:]]

    all_ = ", ".join(NAMES)
    assert call("check") == [f"{name}: applies" for name in NAMES]
    assert call("apply") == [f"applied {all_}"]
    assert call("apply") == ["already applied, nothing to do"]
    assert call("check") == [f"{name}: applied" for name in NAMES]
    assert call("revert") == [f"took out {all_}"]
    assert call("revert") == ["nothing is applied, nothing to do"]


def test_the_command_names_the_hunk_and_ends_with_2(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree / "megatron/training/arguments.py"
    path.write_text(path.read_text().replace("import dataclasses\n", "import dataclasses as d\n"))
    monkeypatch.setattr("sys.argv", ["megatron-flux", "patch-source", "check", str(tree)])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert "  0001-arguments: conflicts, megatron/training/arguments.py, hunk '@@ -5,4 +5,5 @@'" in printed.out
    assert printed.err.startswith("megatron-flux: error: 0001-arguments of core_v")
    assert len(printed.err.splitlines()) == 1
