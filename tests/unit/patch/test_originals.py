"""What another library may exchange is looked at when the patch is made, not in a step."""

import pytest
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_flux.patch import originals


def test_a_first_call_finds_everything_known(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ColumnParallelLinear._forward_impl"
    found = originals.Originals(originals.COLUMN, name, ColumnParallelLinear._forward_impl)
    monkeypatch.setattr(originals, "_reason", lambda label, _: pytest.fail(f"{label} is looked at in a call"))
    assert found.why_stock() is None
