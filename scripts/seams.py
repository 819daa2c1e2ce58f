#!/usr/bin/env python3
"""Show what changed between two releases of the code that this package replaces or does anew.

    python scripts/seams.py OLD NEW     # of megatron-core or TransformerEngine: a folder or a wheel each
    python scripts/seams.py NEW         # digests for megatron_flux/patch, and which differ from those there

Use it when a release of either comes out. A folder is a checkout or ``site-packages``. Only text is read; nothing of a
release is imported. What is compared stands in ``megatron_flux/patch``: ``REPLACED``, ``TE_REPLACED`` and
``NEWEST_SEAMS``. Each function of it whose code differs is printed as a diff, docstrings and comments apart. Exit code
1: something moved; read it (of NEW alone: and it is no wheel of a supported release older than the newest known one).
Names that are gone are found by the tests, run in an environment with the new release.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_flux.patch import megatron_core, te_seam
from megatron_flux.patch.seams import digests, functions

KNOWN = megatron_core.NEWEST_SEAMS | te_seam.NEWEST_SEAMS
PATHS = (*megatron_core.REPLACED, *megatron_core.TE_REPLACED, *KNOWN)
READ = {
    "megatron_core": megatron_core.SUPPORTED_MEGATRON_CORE & f"<{megatron_core.NEWEST}",
    "transformer_engine": te_seam.SUPPORTED_TE & f"<{te_seam.NEWEST}",
}
"""Releases that were compared with their successors when those came out."""


def main() -> int:
    """See the exit code above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the newest supported release")
    parser.add_argument("new", type=Path, nargs="?", help="the other one")
    options = parser.parse_args()
    if options.new is None:
        found = digests(options.old, PATHS)
        print(*(f'    "{path}": "{digest}",' for path, digest in found.items()), sep="\n")
        moved = [path for path, digest in found.items() if digest != KNOWN.get(path)]
        print(f"{len(moved)} of {len(found)} differ from the newest known release:", *moved, sep="\n")
        return 1 if (moved or not found) and not was_read(options.old) else 0
    places, lines = 0, []
    for path in dict.fromkeys(PATHS):
        before, after = (code(release, path) for release in (options.old, options.new))
        if before:  # else of the other package, or inherited
            places += 1
            lines += differences(path, before, after)
    print(*lines, f"{places} places looked at", sep="\n")
    return 1 if lines or not places else 0


def was_read(release: Path) -> bool:
    """Return True for a wheel of a supported release that is older than the newest known one."""
    name, _, rest = release.name.partition("-")
    found = megatron_core.release_of(rest.partition("-")[0])
    return name in READ and found is not None and found in READ[name]


def code(release: Path, path: str) -> dict[str, str]:
    """Return the functions behind ``path`` as text."""
    return {name: ast.unparse(found) for name, found in functions(release, path).items()}


def differences(path: str, before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Yield what moved of ``path``: functions that are gone or new, and diffs of the others."""
    module = path.partition(":")[0]
    for name in before | after:
        if name not in after:
            yield f"gone {module}:{name}"
        elif name not in before:
            yield f"new  {module}:{name} ({after[name].count(chr(10)) + 1} lines)"
        elif before[name] != after[name]:
            texts = (text.splitlines() for text in (before[name], after[name]))
            yield f"code {module}:{name}"
            yield from (f"    {line}" for line in difflib.unified_diff(*texts, lineterm="", n=2))


if __name__ == "__main__":
    sys.exit(main())
