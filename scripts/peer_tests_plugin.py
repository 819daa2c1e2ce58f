"""pytest plugin of peer_tests.py: switches flux on where asked, and records what became of every test on this rank.

Reads PEER_TESTS_ARM (stock or flux) and PEER_TESTS_OUT (a prefix; ``.rank<n>.jsonl`` is added). A line is on disk as
soon as its test has ended, so that a run that hangs or is ended keeps what it had.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import Any

import pytest

_RANKING = ("passed", "skipped", "failed")  # over set-up, call and tear-down the last of these counts
_path = f"{os.environ['PEER_TESTS_OUT']}.rank{os.environ.get('RANK', '0')}.jsonl"
_worst: dict[str, str] = {}
_told: dict[str, Any] = {}


def _write(row: dict[str, Any]) -> None:
    with open(_path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _no_download(*args: Any, **kwargs: Any) -> None:
    raise ImportError("peer_tests.py downloads nothing")


def pytest_configure(config: Any) -> None:
    """Keep Megatron-LM's conftest from downloading test data, and patch before anything of Megatron runs."""
    download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = _no_download  # type: ignore[attr-defined]
    sys.modules[download.__name__] = download
    if importlib.util.find_spec("transformer_engine") is None:
        from megatron.core import utils
        from packaging.version import Version

        utils.get_te_version = lambda: Version("0")  # its own answer, None, cannot be compared: every test would fail
    if os.environ["PEER_TESTS_ARM"] == "flux":
        import megatron_flux

        megatron_flux.patch()
        _tell_calls()


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be imported counts as one failed test, and one that skips itself as a whole as one skipped."""
    if not report.passed:
        _write({"test": f"{report.nodeid} (import)", "outcome": report.outcome, "why": _last_line(report)})


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst phase; a test that passed is written when it is over."""
    _worst[report.nodeid] = max(_worst.get(report.nodeid, "passed"), report.outcome, key=_RANKING.index)
    if report.outcome != "passed":
        _write({"test": report.nodeid, "outcome": report.outcome, "why": _last_line(report)})
    elif report.when == "teardown" and _worst[report.nodeid] == "passed":
        _write({"test": report.nodeid, "outcome": "passed"})
    if report.when == "teardown":
        _tell_calls()


def _tell_calls() -> None:
    """What flux has done so far, the proof that the patched arm was patched, whenever it has changed."""
    global _told
    if os.environ["PEER_TESTS_ARM"] == "flux":
        import megatron_flux

        report = megatron_flux.report()
        if report != _told:
            _told = report
            _write({"flux": report})


def pytest_sessionfinish(session: Any) -> None:
    """No error for tests that failed: torchrun ends the ranks that are still at work as soon as one ends with an error.

    What failed is in the file.
    """
    if session.exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.OK


def _last_line(report: Any) -> str:
    if isinstance(report.longrepr, tuple):  # of a skip: path, line, reason
        return str(report.longrepr[2])[:300]
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")] or [
        str(report.longrepr)[-300:]
    ]
    return lines[-1].removeprefix("E").strip()[:300]
