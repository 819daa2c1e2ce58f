"""A call that has been made before visits few files of the package: the path a reader has to follow stays short."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_flux
from megatron_flux import cuda_driver, ops
from megatron_flux.comm.copy_engine import Copy, Push
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.slab import CopyStream, Slab
from megatron_flux.ops import fast_path
from megatron_flux.ops.fast_path import PreparedAllGatherGemm, PreparedGemmAllReduce, Side
from tests.unit.groups import group_of

pytest.importorskip("triton")

from megatron_flux.kernels.launch import Relaunch

PACKAGE = str(Path(megatron_flux.__file__).parent) + os.sep


def visited(call: Callable[[], Any]) -> list[str]:
    """Files of the package in which a function ran in ``call``, in order of the first visit."""
    found: dict[str, None] = {}

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code.co_filename.removeprefix(PACKAGE)] = None

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


class Operand:
    """A contiguous tensor on a GPU, as far as a prepared call looks at it."""

    is_cuda, dtype = True, torch.bfloat16

    def __init__(self, *shape: int) -> None:
        self.shape = torch.Size(shape)
        self.is_contiguous, self.data_ptr, self.get_device = lambda: True, lambda: 4096, lambda: 0
        self.t = lambda: Operand(*reversed(shape))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any, named: Any = None) -> Operand:
        assert function is torch.matmul
        return cls(*given[0].shape[:-1], given[1].shape[1])

    def new_empty(self, shape: tuple[int, ...]) -> Operand:
        return Operand(*shape)


class Driver:
    """CUDA's driver, which does all it is asked for and keeps the names of the calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: self.asked.append(name) or 0


def relaunch(operands: int = 4) -> Relaunch:
    """A kernel of so many operands, whose parameters are laid out."""
    made = object.__new__(Relaunch)
    made._values = [ctypes.c_uint64(0) for _ in range(5)]
    made._operands = [(at, None) for at in range(operands)]
    made._parameters = (ctypes.c_void_p * 5)()
    made._function, made._grid, made._threads, made._shared = 1, 132, 384, 0
    return made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    return driver


def slab() -> Slab:
    device: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), get_device=lambda: 0)
    alarm: Any = SimpleNamespace(view=[0])
    empty = torch.empty(0)
    return Slab(2, 0, 0, False, [], [], device, empty, empty, empty, alarm)


def test_a_prepared_all_gather_gemm_visits_nine_files(driver: Driver) -> None:
    work, empty = slab(), torch.empty(0)
    pushes = [Push([Copy(1000, 0, 64, 1, 64, 2000)], 3000)] * 2
    side = Side(20, 1, 2, CopyStream(None, None, None))  # type: ignore[arg-type]
    prepared = PreparedAllGatherGemm(work, [relaunch()] * 2, (8, 6), [empty, empty], pushes, side)
    group, x, weight = group_of(2), Operand(4, 4), Operand(6, 4)
    key = fast_path.key_of("all_gather_gemm", x, weight, None, "auto")  # type: ignore[arg-type]
    state_of(group).prepared[key] = fast_path.Entry(prepared, "tuned", 99)
    results = []
    files = visited(lambda: results.append(ops.all_gather_gemm(x, weight, group)))  # type: ignore[arg-type]
    assert results[0].shape == (8, 6)
    assert driver.asked == [
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyDtoDAsync_v2",  # the shard, and the flag behind it
        "cuMemcpyDtoDAsync_v2",
        "cuEventRecord",
        "cuLaunchKernel",
        "cuStreamWaitEvent",
    ]
    assert len(files) <= 9, files


@pytest.mark.parametrize("own_gemm", [False, True])
def test_a_prepared_gemm_all_reduce_is_one_launch_from_ten_files(driver: Driver, own_gemm: bool) -> None:
    launches = [relaunch(3 if own_gemm else 2)] * 2
    prepared = PreparedGemmAllReduce(slab(), launches, (1, 2, 6), own_gemm=own_gemm, transposed=False)
    group, x, weight = group_of(2), Operand(1, 2, 4), Operand(6, 4)
    key = fast_path.key_of("gemm_all_reduce", x, weight, None, "auto")  # type: ignore[arg-type]
    state_of(group).prepared[key] = fast_path.Entry(prepared, "tuned", 99)
    results = []
    files = visited(lambda: results.append(ops.gemm_all_reduce(x, weight, group)))  # type: ignore[arg-type]
    assert results[0].shape == (1, 2, 6)
    assert driver.asked == ["cuLaunchKernel"]  # beside that of torch's GEMM
    assert ("ops/gemm.py" in files) is not own_gemm
    assert len(files) <= 10, files
    assert "ops/launch/all_reduce.py" not in files
