#!/usr/bin/env python3
"""Show what changed between two releases of the code that this package replaces or does anew.

    python scripts/seams.py OLD NEW     # of megatron-core or TransformerEngine: a folder or a wheel each

Use it when a release of either comes out. A folder is a checkout or ``site-packages``. Only text is read; nothing of a
release is imported. What is compared stands in ``megatron_flux/patch``: ``REPLACED``, ``TE_REPLACED`` and
``REIMPLEMENTED``. Each function of it whose code differs is printed as a diff, docstrings and comments apart. Exit code
1: something moved; read it. Names that are gone are found by the tests, run in an environment with the new release.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from megatron_flux.patch import megatron_core, te_fp8, te_seam

PATHS = (
    *(*megatron_core.REPLACED, *megatron_core.TE_REPLACED, *megatron_core.REIMPLEMENTED),
    *(*te_seam.REIMPLEMENTED, *te_fp8.REIMPLEMENTED),
)


def main() -> int:
    """See the exit code above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the newest supported release")
    parser.add_argument("new", type=Path, help="the other one")
    options = parser.parse_args()
    found, lines = 0, []
    for path in dict.fromkeys(PATHS):
        before = functions(options.old, path)
        if before:  # else of the other package, or inherited
            found += 1
            lines += differences(path, before, functions(options.new, path))
    print(*lines, f"{found} places looked at", sep="\n")
    return 1 if lines or not found else 0


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


def functions(release: Path, path: str) -> dict[str, str]:
    """Return the code of the functions behind ``module`` or ``module:name``, by qualified name; nothing: not there."""
    module, _, wanted = path.partition(":")
    for name in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
        if (text := read(release, name)) is not None:
            found = dict(_functions(ast.parse(text), ""))
            return {name: code for name, code in found.items() if f"{name}.".startswith(f"{wanted}." if wanted else "")}
    return {}


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            _without_docstrings(child)
            yield prefix + child.name, ast.unparse(child)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):  # definitions under a condition
            yield from _functions(child, prefix)


def _without_docstrings(function: ast.FunctionDef) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def read(release: Path, name: str) -> str | None:
    """Return the text of a file of the release, None if it has none of that name."""
    if release.is_dir():
        file = release / name
        return file.read_text(encoding="utf-8") if file.is_file() else None
    with zipfile.ZipFile(release) as wheel:
        return wheel.read(name).decode() if name in wheel.namelist() else None


if __name__ == "__main__":
    sys.exit(main())
