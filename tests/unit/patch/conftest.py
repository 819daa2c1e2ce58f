"""Fixtures of the patch's tests."""

import pytest

from tests.unit.patch.layers import Traced


@pytest.fixture
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """A patch for a megatron-core that has added the parameter, or nothing."""
    return Traced(getattr(request, "param", {}), monkeypatch)
