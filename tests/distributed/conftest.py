"""The worker pools, started on first use and ended with these tests: idle ones would slow down those that follow.

What they are forked from has no threads and stays, for tests/field has pools, too.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.pool import MEGATRON, NEWEST_BRIDGE, TRANSFORMER_ENGINE, Template, WorkerPool


@pytest.fixture(scope="session", autouse=True)
def templates() -> Iterator[None]:
    """The processes that workers are forked from end after all pools."""
    yield
    for template in (MEGATRON, TRANSFORMER_ENGINE, NEWEST_BRIDGE):
        template.stop()


def _pool(size: int, template: Template = MEGATRON, scope: Any = "package") -> Any:
    @pytest.fixture(scope=scope)
    def pool() -> Iterator[WorkerPool]:
        with WorkerPool(size, template=template) as made:
            yield made

    return pool


def _each(name: str) -> Any:
    @pytest.fixture(params=[2, 4], ids=["tp2", "tp4"], scope="package")
    def pool(request: pytest.FixtureRequest) -> WorkerPool:
        return request.getfixturevalue(f"{name}{request.param}")

    return pool


world2, world4, world = _pool(2), _pool(4), _each("world")
"""Two ranks, four, and first two, then four."""
te_world2, te_world4, te_world = _pool(2, TRANSFORMER_ENGINE), _pool(4, TRANSFORMER_ENGINE), _each("te_world")
"""The same for TransformerEngine, which must be there before megatron-core is imported."""
libraries_world2 = _pool(2, TRANSFORMER_ENGINE, "module")
"""Two ranks of a file's own, for libraries that exchange functions of megatron-core."""
newest_bridge_world2 = _pool(2, NEWEST_BRIDGE, "module")
"""Two ranks over the newest Megatron-Bridge, and megatron-core and TransformerEngine as it wants them."""
