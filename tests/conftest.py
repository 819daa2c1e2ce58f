"""For all tests: nothing that they start may be there when they have ended; one warm Python serves them all."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.left_behind import pytest_sessionfinish, pytest_sessionstart, pytest_terminal_summary
from tests.warm import Warm

__all__ = ["pytest_sessionfinish", "pytest_sessionstart", "pytest_terminal_summary"]

gc.disable()  # until all has been imported, of which nothing is garbage


def pytest_collection_finish() -> None:
    """No collection looks through what has been imported again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extension modules complain of leaks at exit otherwise."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A Python with everything imported, see :mod:`tests.warm`; fresh ones are for tests of starts and ends."""
    warm = Warm()
    yield str(warm.python)
    warm.stop()
