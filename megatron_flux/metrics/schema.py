"""The record as code: the names and kinds of its fields, from ``schema.md``, and whether something is a record.

``schema.md`` beside this file is the whole definition, with units, meanings and what changed between versions.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

SCHEMA_VERSION = 3
BREAKDOWN_VERSION = 1


def _integer(value: Any) -> bool:
    # bool is an int in Python, and a count that is `true` is a mistake.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _object(value: Any, right: Callable[[Any], bool] = lambda item: True) -> bool:
    return isinstance(value, dict) and all(map(right, value.values()))


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a non-negative integer", _integer),
    "float": ("a number", _number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "counts": ("an object of non-negative integers", lambda value: _object(value, _integer)),
    "floats": (
        "an object of numbers or nulls",
        lambda value: _object(value, lambda item: item is None or _number(item)),
    ),
    "object": ("an object", _object),
    "objects": ("a list of objects", lambda value: isinstance(value, list) and all(map(_object, value))),
}
"""What a value of each kind is, and whether one is."""


class Field(NamedTuple):
    """One field of a record."""

    name: str
    kind: str
    """One of :data:`KINDS`."""
    nullable: bool
    """The value may be null, or the field absent: it is not known."""


def described(title: str) -> dict[str, str]:
    """What ``schema.md`` says in the table under a heading: by name the cell behind it."""
    text = resources.files(__package__).joinpath("schema.md").read_text(encoding="utf-8")
    rows = text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    cells = (row.split(" | ") for row in rows if row.startswith("| `"))
    return {name.strip("| `"): found.removesuffix(" |") for name, found, *_ in cells}


FIELDS = tuple(Field(name, kind.removesuffix("?"), kind.endswith("?")) for name, kind in described("Record").items())

COUNTED = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
"""Operators with a GEMM, whose calls have a field each."""

FUSED_WAITS = "Waiting for peers inside a fused kernel counts as that kernel, not as exposed communication."
"""What stands beside every figure of exposed communication that comes from a trace: its timeline has kernels, and does
not show what a fused one waits for."""

BREAKDOWN_PARTS = ("gemm", "fused", "attention", "norm", "optimizer", "other", "communication_exposed", "idle")


def problem(record: Any, after: int = 0) -> str | None:
    """What is wrong with a decoded record, in a few words; None if it follows the schema and iteration ``after``."""
    if not isinstance(record, dict):
        return f"a record is a JSON object, this is a {type(record).__name__}"
    version = record.get("schema", 1)
    if not _integer(version) or not 1 <= version <= SCHEMA_VERSION:
        return f"schema version {version!r}, this program reads 1 to {SCHEMA_VERSION}"
    for field in FIELDS:
        value = record.get(field.name)
        if value is None:
            if field.nullable:
                continue
            return f"{field.name!r} is {'null' if field.name in record else 'missing'}"
        expected, right = KINDS[field.kind]
        if not right(value):
            return f"{field.name!r} is {value!r}, expected {expected}"
    if (iteration := record["iteration"]) > after:
        return None
    if after:
        return f"iteration {iteration} after iteration {after}"
    return f"'iteration' is {iteration}, iterations count from 1"
