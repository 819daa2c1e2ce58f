"""Code of other packages that flux does anew, and whether a release has changed it.

A release newer than the newest known one is used where this code is the same as in that one. Only text is read; nothing
of a release is imported. A digest is of the code's structure: comments, docstrings and Python's version do not count.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

logger = logging.getLogger("megatron_flux")

_NOT_CODE = ("ctx", "kind", "type_comment", "type_params")
"""Fields of syntax trees that say nothing, or that not every Python has."""


def functions(release: Path, path: str) -> dict[str, ast.FunctionDef]:
    """Return the functions behind ``module`` or ``module:name`` in a folder or wheel, by name, without docstrings."""
    module, _, wanted = path.partition(":")
    for name in (f"{module.replace('.', '/')}.py", f"{module.replace('.', '/')}/__init__.py"):
        if (text := _read(release, name)) is not None:
            found = dict(_functions(ast.parse(text), ""))
            return {name: code for name, code in found.items() if f"{name}.".startswith(f"{wanted}." if wanted else "")}
    return {}


def digest(release: Path, path: str) -> str:
    """Return twelve hexadecimal digits of the code behind ``path``, as of :func:`functions`."""
    found = {name: _structure(code) for name, code in functions(release, path).items()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:12]


def changed(release: Path, digests: Mapping[str, str], found: str, known: str) -> list[str]:
    """Return the paths whose code in ``release`` has another digest than in ``digests``, those of the newest known one.

    If there is none, a warning says that ``found`` (package and version) runs as the newest of the range ``known``.
    """
    moved = [path for path, newest in digests.items() if digest(release, path) != newest]
    if not moved:
        message = "megatron_flux: %s is newer than %s. It runs as the newest of these: its linears are the same"
        logger.warning(message, found, known)
    return moved


def digests(release: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the digests of the ``paths`` that a release has."""
    return {path: digest(release, path) for path in dict.fromkeys(paths) if functions(release, path)}


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            _drop_docstrings(child)
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):  # definitions under a condition
            yield from _functions(child, prefix)


def _drop_docstrings(function: ast.FunctionDef) -> None:
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]


def _structure(node: object) -> object:
    if isinstance(node, ast.AST):
        return type(node).__name__, [_structure(getattr(node, name)) for name in node._fields if name not in _NOT_CODE]
    return [_structure(item) for item in node] if isinstance(node, list) else repr(node)


def _read(release: Path, name: str) -> str | None:
    file = (release if release.is_dir() else zipfile.Path(release)) / name
    return file.read_text(encoding="utf-8") if file.is_file() else None
