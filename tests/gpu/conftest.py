"""GPU tests: skipped, with the reason, where there are too few GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import WorkerPool

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
NEEDS_TE = pytest.mark.skipif(not HAVE_TE, reason="TransformerEngine is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.nodeid]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in here:
        item.add_marker(pytest.mark.gpu)
        needed = (item.get_closest_marker("gpus") or pytest.mark.gpus(1).mark).args[0]
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {count}"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print why a test failed at once: pytest's own summary is lost where ``scripts/gpu_tests.py`` cuts it off."""
    if report.failed and "tests/gpu/" in report.nodeid:
        print(f"\n{report.longreprtext}")


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    """Two of a file's own: graphs change the process's random generators and streams."""
    with WorkerPool(2, backend="nccl") as pool:
        yield pool


@pytest.fixture(scope="session")
def nccl2() -> Iterator[WorkerPool]:
    """Two ranks, each on its own GPU."""
    with WorkerPool(2, backend="nccl") as pool:
        yield pool
