"""The version a tree of megatron-core sources states, read without importing or running any of it."""

from __future__ import annotations

import ast
from pathlib import Path

FILE = "package_info.py"
_PARTS = ("MAJOR", "MINOR", "PATCH")


def version_of_tree(core: Path) -> str:
    """The version in ``package_info.py`` of a ``megatron/core`` folder, such as ``0.16.1`` or ``0.17.0rc0``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not assign the constants ``MAJOR``, ``MINOR`` and ``PATCH``.
    """
    path = core / FILE
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: {error}") from error
    constants = {
        statement.targets[0].id: statement.value.value
        for statement in body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
    }
    missing = [name for name in _PARTS if name not in constants]
    if missing:
        raise ValueError(f"{path} does not assign {', '.join(missing)}")
    return ".".join(str(constants[name]) for name in _PARTS) + str(constants.get("PRE_RELEASE", ""))
