"""A test session that leaves processes behind fails, and names them.

Daemons and worker pools are fixtures, and have been ended by then.
"""

import contextlib
import os
import sys
import uuid

import pytest

from tests.processes import MARK, left, with_mark

SECONDS = 20.0
"""Seconds for processes that were asked to end. Ranks that lost their launcher end within a few."""

_mark = pytest.StashKey[str]()
_found = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Mark what this process starts from now on."""
    session.config.stash[_mark] = uuid.uuid4().hex
    os.environ[MARK] = with_mark(session.config.stash[_mark])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for them; fixtures of all scopes have been torn down."""
    if "wandb" in sys.modules:
        with contextlib.suppress(OSError):  # its service has ended already
            sys.modules["wandb"].teardown()  # as at the end of this process: its service serves all tests
    found = left(session.config.stash[_mark], SECONDS)
    session.config.stash[_found] = found
    if found and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name them."""
    found = config.stash.get(_found, [])
    if found:
        terminalreporter.section("processes left behind", sep="=", red=True)
        terminalreporter.write_line("\n".join(found))
