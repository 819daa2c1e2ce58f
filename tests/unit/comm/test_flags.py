"""Flags of the warp-specialised kernels stay within their half of a slab: what lies behind is the other half's data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.comm import slab
from megatron_flux.errors import UserError
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.checks import OperatorCall
from megatron_flux.ops.kernel_config import KernelConfig, candidates, cdiv, within_flags
from tests.unit.groups import group_of

pytest.importorskip("triton")

from megatron_flux.ops import launch

ROWS = (8192, 16384, 16384 + 128, 65536, 131072 - 128)


def flags(plan: KernelConfig, m: int, k: int) -> int:
    """As the kernel counts them: one per row and chunk where SMs push."""
    chunk = cdiv(cdiv(k, plan.chunks), plan.bk) * plan.bk
    return m * cdiv(k, chunk)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "hopper_kernels", lambda *_: True)
    monkeypatch.setattr(launch, "sm_count", lambda _: 132)
    monkeypatch.setattr(FusedBackend, "_slab", lambda *_: None)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("k", [1024, 12288])
def test_rows_that_are_pushed_have_flags(on_hopper: None, m: int, k: int) -> None:
    x, w = torch.empty(m // 2, k, device="meta").bfloat16(), torch.empty(4608, k, device="meta").bfloat16()
    call = OperatorCall("all_gather_gemm", x, w, group_of(2))
    pushing = [plan for plan in candidates("all_gather_gemm", m // 2, 4608, k, 2, 132, True) if plan.comm]
    assert pushing
    for wanted in (*pushing, KernelConfig(ws=True, comm=1, chunks=8)):
        _, plan = FusedBackend()._placed(call, wanted, False)
        assert 0 < flags(plan, m, k) <= slab.CALL_FLAGS
        assert (plan == wanted) is (8 * m <= slab.CALL_FLAGS)


def test_more_rows_than_flags_are_refused_and_not_proposed() -> None:
    assert all(plan.comm == 0 for plan in candidates("all_gather_gemm", 65536, 4608, 12288, 2, 132, True))
    with pytest.raises(UserError, match="131072 gathered rows cannot be pushed by SMs, at most 131008"):
        within_flags(KernelConfig(ws=True, comm=1), 131072)
    copied = KernelConfig(ws=True, chunks=4)
    assert within_flags(copied, 131072) is copied


def test_tiles_have_flags(on_hopper: None) -> None:
    x, w = torch.empty(1 << 17, 64, device="meta").bfloat16(), torch.empty(1 << 16, 64, device="meta").bfloat16()
    work: Any = SimpleNamespace(tp=2, rank=0)  # its turn must not begin
    call = OperatorCall("gemm_reduce_scatter", x, w, group_of(2))
    with pytest.raises(UserError, match="too many tiles for 65536 x 65536"):
        launch.gemm_reduce_scatter(call, work, KernelConfig(ws=True), None)  # type: ignore[arg-type]
