"""For all tests: nothing that they start may be there when they have ended."""

from tests.left_behind import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary

__all__ = ["pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]
