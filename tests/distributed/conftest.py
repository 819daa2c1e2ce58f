"""The worker pools, started on first use and ended with these tests: idle ones would slow down those that follow.

What they are forked from has no threads and stays, for tests/field has pools, too.
"""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import LIBRARIES, MEGATRON, NEWEST_BRIDGE, TRANSFORMER_ENGINE, Template, WorkerPool


@pytest.fixture(scope="session", autouse=True)
def templates() -> Iterator[None]:
    """The processes that workers are forked from end after all pools."""
    yield
    for template in (MEGATRON, TRANSFORMER_ENGINE, LIBRARIES, NEWEST_BRIDGE):
        template.stop()


def _pool(size: int, template: Template = MEGATRON) -> Iterator[WorkerPool]:
    with WorkerPool(size, template=template) as pool:
        yield pool


@pytest.fixture(scope="package")
def world2() -> Iterator[WorkerPool]:
    """Two ranks."""
    yield from _pool(2)


@pytest.fixture(scope="package")
def world4() -> Iterator[WorkerPool]:
    """Four ranks."""
    yield from _pool(4)


@pytest.fixture(scope="package")
def te_world2() -> Iterator[WorkerPool]:
    """Two ranks of their own for TransformerEngine, which must be there before megatron-core is imported."""
    yield from _pool(2, TRANSFORMER_ENGINE)


@pytest.fixture(scope="package")
def te_world4() -> Iterator[WorkerPool]:
    """Four of them."""
    yield from _pool(4, TRANSFORMER_ENGINE)


@pytest.fixture(scope="module")
def libraries_world2() -> Iterator[WorkerPool]:
    """Two ranks of a file's own, for libraries that exchange functions of megatron-core."""
    yield from _pool(2, LIBRARIES)


@pytest.fixture(scope="module")
def newest_bridge_world2() -> Iterator[WorkerPool]:
    """Two ranks over the newest Megatron-Bridge, and megatron-core and TransformerEngine as it wants them."""
    yield from _pool(2, NEWEST_BRIDGE)


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"], scope="package")
def te_world(request: pytest.FixtureRequest) -> WorkerPool:
    """Two ranks for TransformerEngine, then four."""
    return request.getfixturevalue(f"te_world{request.param}")


@pytest.fixture(params=[2, 4], ids=["tp2", "tp4"], scope="package")
def world(request: pytest.FixtureRequest) -> WorkerPool:
    """Two ranks, then four."""
    return request.getfixturevalue(f"world{request.param}")
