"""Flags of the warp-specialised kernels stay within their half of a slab: what lies behind is the other half's data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.errors import UserError
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig
from tests.unit.groups import group_of

pytest.importorskip("triton")

from megatron_flux.ops import launch


def test_tiles_have_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "sm_count", lambda _: 132)
    x, w = torch.empty(1 << 17, 64, device="meta").bfloat16(), torch.empty(1 << 16, 64, device="meta").bfloat16()
    work: Any = SimpleNamespace(tp=2, rank=0)  # its turn must not begin
    call = OperatorCall("gemm_reduce_scatter", x, w, group_of(2))
    with pytest.raises(UserError, match="too many tiles for 65536 x 65536"):
        launch.gemm_reduce_scatter(call, work, KernelConfig(ws=True), None)  # type: ignore[arg-type]
