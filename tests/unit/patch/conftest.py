"""Fixtures of the patch's tests."""

import pytest

from megatron_flux.patch.megatron_core import LINES
from tests.unit.patch.layers import Traced


@pytest.fixture
def traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Traced:
    """A patch for the line of megatron-core that is the parameter, or for the oldest one."""
    return Traced(getattr(request, "param", LINES[0]), monkeypatch)
