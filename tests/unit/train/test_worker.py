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


@pytest.mark.parametrize("refused", [False, True])
def test_garbage_is_looked_for_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    seen: dict[str, Any] = {}

    @contextmanager
    def world(config: Any) -> Iterator[tuple[None, None]]:
        seen["imports"] = gc.isenabled()
        if refused:
            raise ValueError
        yield None, None

    monkeypatch.setattr(worker, "world", world)
    monkeypatch.setattr(worker.dist, "broadcast_object_list", mock.Mock())
    monkeypatch.setattr(loop, "run", lambda *_: seen.update(steps=gc.isenabled(), frozen=gc.get_freeze_count() > 1e5))
    try:
        worker.run(mock.MagicMock())
    except ValueError:
        assert refused
    assert seen == ({"imports": False} if refused else {"imports": False, "steps": True, "frozen": True})
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
