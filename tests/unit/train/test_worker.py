"""When a rank looks for garbage: not while it imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from megatron_flux.train import loop, worker


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What tests have imported, as tests/conftest.py has left it."""
    yield
    gc.freeze()


def test_garbage_is_looked_for_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    @contextmanager
    def world(config: Any) -> Iterator[tuple[None, None]]:
        seen["imports"] = gc.isenabled()
        yield None, None

    monkeypatch.setattr(worker, "world", world)
    monkeypatch.setattr(worker.dist, "broadcast_object_list", mock.Mock())
    monkeypatch.setattr(loop, "run", lambda *_: seen.update(steps=gc.isenabled(), frozen=gc.get_freeze_count() > 1e5))
    worker.run(mock.MagicMock())
    assert seen == {"imports": False, "steps": True, "frozen": True}
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
