"""docs/commands.md has every option of every command, with its default and its help text."""

from __future__ import annotations

from scripts import option_tables


def test_tables_are_those_of_the_commands() -> None:
    """If it fails: ``python -m scripts.option_tables``."""
    text = option_tables.FILE.read_text(encoding="utf-8")
    assert option_tables.document(text) == text
