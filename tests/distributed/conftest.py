"""The worker pools, started on first use and ended with these tests: idle ones would slow down those that follow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed import te_stand_in
from tests.distributed.pool import WorkerPool


def _pool(size: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(size)
    yield pool
    pool.stop()


@pytest.fixture(scope="package")
def world2() -> Iterator[WorkerPool]:
    """Two ranks."""
    yield from _pool(2)


@pytest.fixture(scope="package")
def world4() -> Iterator[WorkerPool]:
    """Four ranks."""
    yield from _pool(4)


def _te_pool(size: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(size)
    pool.run(te_stand_in.warm_up, timeout=300.0)
    yield pool
    pool.stop()


@pytest.fixture(scope="package")
def te_world2() -> Iterator[WorkerPool]:
    """Two ranks of their own for TransformerEngine, which must be there before megatron-core is imported."""
    yield from _te_pool(2)


@pytest.fixture(scope="package")
def te_world4() -> Iterator[WorkerPool]:
    """Four of them."""
    yield from _te_pool(4)


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"], scope="package")
def te_world(request: pytest.FixtureRequest) -> WorkerPool:
    """Two ranks for TransformerEngine, then four."""
    return request.getfixturevalue(f"te_world{request.param}")


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"], scope="package")
def world(request: pytest.FixtureRequest) -> WorkerPool:
    """Two ranks, then four."""
    return request.getfixturevalue(f"world{request.param}")
