"""GPU tests: skipped, with the reason, where there are too few GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import WorkerPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/gpu/" in item.nodeid]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in here:
        item.add_marker(pytest.mark.gpu)
        needed = (item.get_closest_marker("gpus") or pytest.mark.gpus(1).mark).args[0]
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {count}"))


@pytest.fixture(scope="session")
def nccl2() -> Iterator[WorkerPool]:
    """Two ranks, each on its own GPU."""
    with WorkerPool(2, backend="nccl") as pool:
        yield pool
