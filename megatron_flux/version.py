"""The package version: setuptools-scm derives it from git when the package is built, this module from there on."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def commit(checkout: Path = Path(__file__).parents[1]) -> str | None:
    """Return the commit that ``checkout`` has checked out; None if it is no git checkout.

    Reads git's files: containers have no git, or one that refuses another user's checkout.
    """
    git = checkout / ".git"
    with suppress(OSError, ValueError):
        if git.is_file():  # a worktree or submodule: "gitdir: PATH"
            git = checkout / git.read_text().strip().removeprefix("gitdir: ")
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        ref, shared = head.removeprefix("ref: "), git
        with suppress(FileNotFoundError):
            shared = git / (git / "commondir").read_text().strip()
        with suppress(FileNotFoundError):
            return (shared / ref).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), None)
    return None


try:
    _built = metadata.version("megatron-flux")
except metadata.PackageNotFoundError:
    _built = "0+unknown"
_now = commit()
# An editable install keeps the commit of the day it was installed, and a pull does not tell it.
__version__ = _built if _now is None else f"{_built.partition('+')[0]}+g{_now[:9]}"
COMMIT = _now or (match[1] if (match := re.search(r"\+g([0-9a-f]+)", __version__)) else None)
"""The commit, as far as it is known: of the checkout, else the short form in the version of what was built."""
