"""docs/commands.md has every option of every command, docs/metrics.md every field of a record."""

from types import ModuleType

import pytest

from scripts import option_tables, record_tables


@pytest.mark.parametrize("tables", [option_tables, record_tables])
def test_tables_are_those_of_the_code(tables: ModuleType) -> None:
    """If it fails: ``python -m scripts.option_tables``, ``python -m scripts.record_tables``."""
    text = tables.FILE.read_text(encoding="utf-8")
    assert tables.document(text) == text
    assert text.count("<!-- end -->") == len(tables.TABLES)
