"""The tables of docs/metrics.md: fields of records, and of the objects in them."""

import re
from pathlib import Path
from typing import Any

_TEXT = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
_EXAMPLES = {"integer": 0, "number": 0.0, "boolean": False, "string": "", "array": [], "object": {}}


def fields(table: str) -> dict[str, tuple[str, str]]:
    """Return type and meaning of the fields in the table that is marked so, by name."""
    found = re.search(rf"<!-- table {table} -->\n.*\n.*\n((?:\|.*\n)+)<!-- end -->", _TEXT)
    assert found is not None, table
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()]
    return {cells[0].strip("`"): (cells[1], cells[-1]) for cells in rows}


def example(table: str) -> dict[str, Any]:
    """Return nothing or zero of its type for every field of a table."""
    return {name: _EXAMPLES[kind.rstrip("?").split()[0]] for name, (kind, _) in fields(table).items()}
