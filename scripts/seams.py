#!/usr/bin/env python3
"""What changed, of all that this package relies on, between a supported release and another one.

    python scripts/seams.py transformer-engine --old transformer_engine-2.18.0-py3-none-any.whl \
        --new transformer_engine-2.19.0-py3-none-any.whl
    python scripts/seams.py megatron-core --new ~/Megatron-LM
    python scripts/seams.py torch --new torch-2.15.0-cp312-cp312-macosx_14_0_arm64.whl

A release is a folder (a checkout, ``site-packages``), a wheel or an sdist, or several of them: TransformerEngine's
kernels are declared in the sdist of ``transformer-engine-torch``, its Python is in the wheel of ``transformer-engine``.
Without ``--old`` it is the installed one. Only text is read; nothing of either release is imported or run.

Printed by seam: names that are gone, parameters that differ (annotations apart), and for code that was written anew
here a unified diff of every function, docstrings and comments apart. Exit code 0: nothing moved. 1: something did; read
it. 2: a release cannot be read, or the old one does not show all that is relied on.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError
from itertools import groupby
from pathlib import Path

from seams_relied import ATTRIBUTES, BY_RELEASE, COMPILED, ROOTS, Relied, relied
from seams_sources import Found, Release, bodies, signature


def main(arguments: Sequence[str] | None = None) -> int:
    """See the exit codes above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=list(ROOTS))
    parser.add_argument("--old", type=Path, nargs="+", default=[], help="a supported release; without it the installed")
    parser.add_argument("--new", type=Path, nargs="+", required=True, help="the other one")
    parser.add_argument("--brief", action="store_true", help="name functions whose code differs, without diffs")
    options = parser.parse_args(arguments)
    try:
        old, new = (Release(options.package, paths) for paths in (options.old, options.new))
        return report(options.package, old, new, brief=options.brief)
    except PackageNotFoundError:
        print(f"{options.package} is not installed; name a release with --old", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    return 2


def report(package: str, old: Release, new: Release, *, brief: bool = False) -> int:
    """Print what moved; the exit code."""
    print(f"{package}: {old.label} -> {new.label}")
    items = relied(package)
    moved = 0
    for seam, group in groupby(sorted(items, key=lambda one: one.seam), key=lambda one: one.seam):
        of_seam = [one for one in group if old.find(one.path) is not None]
        found = [line for one in of_seam for line in changes(one, old, new, brief=brief)]
        print(f"\n{seam}: {len(of_seam)} looked at" + ("" if found else ", nothing moved"), *found, sep="\n")
        moved += len(found)
    unseen = [one.path for one in items if one.seam != ATTRIBUTES and old.find(one.path) is None]
    if unseen:
        print("\nnot looked at, since the sources of the old release do not show them:", *unseen, sep="\n  ")
    return 1 if moved else 2 if set(unseen) - COMPILED - BY_RELEASE else 0


def changes(one: Relied, old: Release, new: Release, *, brief: bool = False) -> Iterator[str]:
    """What to say of one thing that is in the old release; nothing where it is the same in the new one."""
    before, after = old.find(one.path), new.find(one.path)
    if before is None or after is None:
        yield f"  gone       {one.path}"
        return
    if one.body:
        yield from _different_bodies(one.path, before, after, brief=brief)
        return
    was, now = signature(before), signature(after)
    if was != now:
        yield f"  parameters {one.path}\n    - ({was})\n    + ({now})"
    if one.parameters is not None and (count := _count(now)) != one.parameters:
        yield f"  parameters {one.path}: {count}, and the package gives {one.parameters}"


def _count(declared: str) -> int:
    """Parameters of a C++ declaration."""
    while (outer := re.sub(r"<[^<>]*>", "", declared)) != declared:
        declared = outer
    return len(declared.split(","))


def _different_bodies(path: str, before: Found, after: Found, *, brief: bool) -> Iterator[str]:
    was, now = bodies(before), bodies(after)
    added = [name for name in now if name not in was]
    for name, lines in was.items():
        close = [name] if name in now else difflib.get_close_matches(name, added, 1, 0.8)
        other = close[0] if close else ""
        if other in added:
            added.remove(other)
        if lines == now.get(other):
            continue
        renamed = f", now {other}" if other not in ("", name) else ""
        yield f"  {'code      ' if other else 'gone      '} {_shown(path, name)}{renamed}"
        if not brief and other:
            yield from (f"    {line}" for line in difflib.unified_diff(lines, now[other], name, other, lineterm=""))
    for name in added:
        yield f"  new        {_shown(path, name)} ({len(now[name])} lines)"


def _shown(path: str, name: str) -> str:
    """A function of a module, of a class, or itself."""
    return path if path.endswith(f".{name}") else f"{path.partition(':')[0]}:{name}"


if __name__ == "__main__":
    sys.exit(main())
