"""Patch sets for Megatron-LM source trees: which fits a tree, what of it applies, applying and undoing it.

Contract
    * a tree is examined on copies of the files in question; it is written to only after every patch of the set is known
      to apply, and what was written is taken back if a write fails;
    * a patch that is in the tree already is recognised by its reverse applying, so both directions are idempotent;
    * undoing gives the tree's former bytes, because reverse and forward find the same lines.

``git apply`` does the work, or ``patch`` where there is no git: the tree need not be a git checkout. What cannot be
done is a :class:`UserError`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.version import InvalidVersion, Version

from megatron_flux.errors import UserError
from megatron_flux.patch.megatron_core import version_of_tree

State = Literal["applied", "applies", "conflicts"]
_Contents = dict[str, bytes]


class PatchState(NamedTuple):
    """One patch of the set against the tree."""

    name: str
    state: State
    rejected: tuple[str, ...]  # ``file, hunk '@@ header'`` of every hunk that does not fit


class Examination(NamedTuple):
    """A tree, the patch set for its version, and what the tree's files are without and with the whole set."""

    tree: Path
    version: str
    tag: str
    patches: tuple[PatchState, ...]
    now: _Contents
    without: _Contents
    with_all: _Contents


def patch_sets() -> dict[str, tuple[Path, ...]]:
    """The patches by tag, such as ``core_v0.16.1``, each set in the order of application."""
    checkout = Path(__file__).parents[2] / "patches" / "megatron-lm"
    if checkout.is_dir():
        found = list(checkout.glob("*/*.patch"))
    else:
        try:
            package = distribution("megatron-flux")
            found = [Path(str(package.locate_file(f))).resolve() for f in package.files or () if f.suffix == ".patch"]
        except PackageNotFoundError:
            found = []
    tags = sorted({path.parent.name for path in found}, key=lambda tag: Version(tag.removeprefix("core_v")))
    return {tag: tuple(sorted(path for path in found if path.parent.name == tag)) for tag in tags}


def examine(tree: Path) -> Examination:
    """What the patch set for the tree's version would do; changes nothing."""
    version, tag, patches = _set_for(tree)
    texts = [patch.read_text(encoding="utf-8") for patch in patches]
    names = sorted({name for text in texts for name in re.findall(r"^\+\+\+ b/(\S+)", text, flags=re.MULTILINE)})
    if missing := [name for name in names if not (tree / name).is_file()]:
        raise UserError(f"{tree} has no {', '.join(missing)}; a whole Megatron-LM source tree is needed")
    now = without = {name: (tree / name).read_bytes() for name in names}
    applied = set()
    for patch in reversed(patches):
        without, rejected = _run(patch, without, reverse=True)
        if not rejected:
            applied.add(patch)
    states, with_all = [], without
    for patch in patches:
        with_all, rejected = _run(patch, with_all)
        state: State = "applied" if patch in applied else "conflicts" if rejected else "applies"
        states.append(PatchState(patch.stem, state, rejected))
    return Examination(tree, version, tag, tuple(states), now, without, with_all)


def require_clean(found: Examination) -> None:
    """Refuse a tree in which some patch neither is nor applies: names the patch and the first hunk."""
    for patch in found.patches:
        if patch.state == "conflicts":
            raise UserError(
                f"{patch.name} of {found.tag} does not fit {found.tree}: {patch.rejected[0]}; nothing was changed. "
                "Put the file back to the release's, or make the change by hand (patches/README.md says what it is for)"
            )


def apply(tree: Path) -> Examination:
    """Apply what is missing of the set; returns what was found before."""
    found = examine(tree)
    _write(found, found.with_all)
    return found


def revert(tree: Path) -> Examination:
    """Undo what is applied of the set; returns what was found before."""
    found = examine(tree)
    _write(found, found.without)
    return found


def _set_for(tree: Path) -> tuple[str, str, tuple[Path, ...]]:
    try:
        text = version_of_tree(tree / "megatron" / "core")
        version = Version(text)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{tree} is not a Megatron-LM source tree: it has no megatron/core/package_info.py; give the folder that "
            "holds pretrain_gpt.py"
        ) from None
    except (ValueError, InvalidVersion) as error:
        raise UserError(f"{tree}: the version of Megatron-LM cannot be told: {error}") from None
    sets = patch_sets()
    for tag, patches in sets.items():
        if Version(tag.removeprefix("core_v")).release[:2] == version.release[:2]:
            return text, tag, patches
    raise UserError(
        f"there is no patch set for Megatron-LM {text}; there are sets for {', '.join(sets) or 'no version'}. None is "
        "needed to run flux: python -m megatron_flux.run pretrain_gpt.py ... --flux"
    )


def _write(found: Examination, after: _Contents) -> None:
    require_clean(found)
    tree, before = found.tree, found.now
    changed = [name for name in before if before[name] != after[name]]
    if closed := [name for name in changed if not os.access(tree / name, os.W_OK)]:
        raise UserError(f"{tree}: no permission to write {', '.join(closed)}; nothing was changed")
    try:
        for name in changed:
            (tree / name).write_bytes(after[name])
    except OSError as error:
        for name in changed:
            (tree / name).write_bytes(before[name])
        raise UserError(f"{tree}: {error}; nothing was changed") from error


def _run(patch: Path, contents: _Contents, *, reverse: bool = False) -> tuple[_Contents, tuple[str, ...]]:
    """``contents`` after ``patch`` and no rejected hunks, or ``contents`` unchanged and the rejected hunks."""
    if git := shutil.which("git"):
        command = [git, "-c", "core.autocrlf=false", "apply", "--reject", "--whitespace=nowarn", str(patch)]
    elif tool := shutil.which("patch"):
        options = ["--strip=1", "--fuzz=0", "--no-backup-if-mismatch", "--force", "--posix"]
        command = [tool, *options, f"--input={patch}"]
    else:
        raise UserError("neither git nor patch is installed; install one of them")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for name, data in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
        # Without a ceiling git would take the patch's paths as relative to a repository around the temporary folder.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment.update(LC_ALL="C", GIT_CEILING_DIRECTORIES=str(root.parent))
        command += ["--reverse"] if reverse else []
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode == 0:
            return {name: (root / name).read_bytes() for name in contents}, ()
        rejected = tuple(
            f"{path.relative_to(root).with_suffix('')}, hunk '{header}'"
            for path in sorted(root.rglob("*.rej"))
            for header in re.findall(r"^@@ .*", path.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
        )
        return contents, rejected or (done.stderr.strip() or done.stdout.strip(),)
