"""For all tests: nothing that they start may be there when they have ended; one warm Python serves them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.left_behind import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary
from tests.warm import Warm

__all__ = ["pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A Python with everything imported, see :mod:`tests.warm`; fresh ones are for tests of starts and ends."""
    warm = Warm()
    yield str(warm.python)
    warm.stop()
