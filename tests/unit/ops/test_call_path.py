"""A call that has been made before visits few files of the package: the path a reader has to follow stays short."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux import cuda_driver, ops
from megatron_flux.comm.copy_engine import Copy, Push, Side
from megatron_flux.comm.group_state import state_of
from megatron_flux.ops import fused
from megatron_flux.ops.all_reduce_config import AllReduceConfig
from megatron_flux.ops.call import OperatorCall
from megatron_flux.ops.fused import AllGatherGemmPlan, Binding, GemmAllReducePlan, Kernels, Views
from megatron_flux.ops.kernel_config import KernelConfig
from tests.unit.groups import group_of, slab_on_gpu
from tests.unit.ops.fakes import called, on_gpu

pytest.importorskip("triton")

from megatron_flux.kernels.launch import Relaunch, Rows


class Driver:
    """CUDA's driver, which does all it is asked for and keeps the names of the calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: self.asked.append(name) or 0


def relaunch(operands: int = 4) -> Relaunch:
    """A kernel of so many operands, whose parameters are laid out."""
    made = object.__new__(Relaunch)
    made._numbers = (ctypes.c_uint64 * 5)()
    made._rows = made.first = Rows((), (), [(at, None) for at in range(operands)], 132)
    made._parameters = (ctypes.c_void_p * 5)()
    made._function, made._threads, made._shared = 1, 384, 0
    return made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    return driver


def made(plan: Any, call: OperatorCall, launches: list[Relaunch]) -> Any:
    """``plan`` as it is after its first two calls."""
    kernels = Kernels(slab_on_gpu(), together=False)
    kernels.launches, plan.counted = list(launches), ("gemm", "tuned")
    binding = plan._bindings[call.x.shape] = Binding(call, kernels, 0)
    binding.rows = [one.first for one in launches]
    return plan


def require_short(call: OperatorCall, plan: Any, run: Callable[[], Any]) -> set[str]:
    """Return the files of the package that a call by ``plan`` visits."""
    state_of(call.group).plans["auto", call.key] = plan
    run()
    functions = called(run)
    files = {name.partition(":")[0] for name in functions}
    assert len(files) <= 8, files
    assert len(functions) <= 20, functions
    return files


def test_a_warm_all_gather_gemm_visits_eight_files(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "sm_count", lambda device: 132)
    call = OperatorCall("all_gather_gemm", on_gpu(4, 4), on_gpu(6, 4), group_of(2), return_gathered=False)
    plan = made(AllGatherGemmPlan(call, KernelConfig(ws=True)), call, [relaunch()] * 2)
    binding = plan._bindings[call.x.shape]
    binding.views = [Views(torch.empty(0), Push([Copy(1000, 0, 64, 1, 64, 2000)], 3000))] * 2
    plan._side = Side(20, 1, 2, None)  # type: ignore[arg-type]
    require_short(call, plan, lambda: ops.all_gather_gemm(call.x, call.weight, call.group))
    assert driver.asked[: len(driver.asked) // 2] == [
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoDAsync_v2",  # the shard, and the flag behind it
        "cuMemcpyDtoDAsync_v2",
        "cuEventRecord",
        "cuLaunchKernel",
        "cuStreamWaitEvent",
    ]


@pytest.mark.parametrize("own_gemm", [False, True])
def test_a_warm_gemm_all_reduce_is_one_launch_from_eight_files(
    driver: Driver, own_gemm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "sm_count", lambda device: 132)
    call = OperatorCall("gemm_all_reduce", on_gpu(1, 2, 4), on_gpu(6, 4), group_of(2))
    config = AllReduceConfig(own_gemm=own_gemm)
    plan = made(GemmAllReducePlan(call, config), call, [relaunch(3 if own_gemm else 2)] * 2)
    files = require_short(call, plan, lambda: ops.gemm_all_reduce(call.x, call.weight, call.group))
    assert driver.asked == ["cuLaunchKernel"] * 2  # beside that of torch's GEMM
    assert ("ops/gemm.py" in files) is not own_gemm
