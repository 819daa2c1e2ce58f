"""Tensors, slabs and kernels of a GPU that is not there: what a plan asks the driver for is recorded."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_flux
from megatron_flux import cuda_driver
from megatron_flux.comm.collectives import Pending
from megatron_flux.comm.copy_engine import Copy, Push, Side
from megatron_flux.comm.group_state import state_of
from megatron_flux.comm.slab import MOST_CALLS
from megatron_flux.errors import OperatorError
from megatron_flux.ops import fused, fused_gather
from megatron_flux.ops.backend import Backend, Plan
from megatron_flux.ops.backends import registry
from megatron_flux.ops.backends.fused import FusedBackend
from megatron_flux.ops.call import OperatorCall
from tests.unit.groups import group_of

STREAM, SIDE, BEFORE, AFTER = 10, 20, 1, 2
PACKAGE = str(Path(megatron_flux.__file__).parent) + os.sep


def called(call: Callable[[], Any]) -> list[str]:
    """Functions of the package that run in ``call``, as ``file:name``, in order; one for all of Triton's kernels."""
    found: list[str] = []

    def see(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            kernel = name.startswith((f"{PACKAGE}kernels/plain", f"{PACKAGE}kernels/device"))
            if not (kernel and found[-1].startswith("kernel:")):
                found.append("kernel:" if kernel else f"{name.removeprefix(PACKAGE)}:{frame.f_code.co_name}")

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU; what is made from it says so, too."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def get_device(self) -> int:
        return 0


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.randn(*shape).to(dtype).as_subclass(OnGpu)


class Work:
    """A slab of rank 1 of 2."""

    captured, capture, tp, rank, half_bytes, in_graphs = False, None, 2, 1, 1 << 20, False

    def __init__(self) -> None:
        self.calls, self.ended, self.limit = 0, 0, MOST_CALLS
        self.open_gather: Pending | None = None
        self.side: Any = None
        self.table: Any = None
        self.poisoned: list[tuple[str, BaseException]] = []
        self.data = [torch.zeros(2 << 20, dtype=torch.uint8).as_subclass(OnGpu) for _ in range(2)]
        self.flags, self.flag_table, self.epochs, self.sums = [torch.zeros(1)] * 2, None, None, None
        self.data_table: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
        self.alarm: Any = SimpleNamespace(words=None, limit=1, close=lambda: None)
        self.scales = torch.zeros(2, 2, 2, 128).as_subclass(OnGpu)  # by half: [tp, kb, ld]

    def make_sums(self, sms: int) -> None:
        self.sums = torch.zeros(1)

    def claim(self, spec: int = 0) -> tuple[int, int]:
        self.check()
        half = self.calls & 1
        self.calls += 1
        return half, STREAM

    def end(self) -> None:
        self.ended += 1

    def check(self) -> None:
        if self.poisoned:
            raise OperatorError("an earlier call was broken off")

    def poison(self, operator: str, error: BaseException) -> None:
        self.poisoned.append((operator, error))

    def current_capture(self) -> int | None:
        return 5 if torch.cuda.is_current_stream_capturing() else None

    def arguments(self, half: int) -> range:
        return range(7)

    def gather_buffer(self, half: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.data[1][half << 20 :].view(dtype)[: math.prod(shape)].view(shape)

    def scale_buffers(self, half: int, *_: Any) -> list[torch.Tensor]:
        return [self.scales[half]] * 2


def kernel(seen: list[tuple[Any, ...]], name: str) -> Callable[..., None]:
    return lambda stream, *operands: seen.append((name, stream, *operands))


def no_launch(*_: Any, **__: Any) -> None:
    raise OperatorError("CUDA refused a launch")


class OneWay(Backend):
    needs_cuda = True
    name = "one way"

    def __init__(self, config: Any = None) -> None:
        self.config, self.plans = config, 0

    def plan(self, call: OperatorCall) -> Plan:
        self.plans += 1
        return FusedBackend().plan(call, self.config)


class Again:
    """A kernel that can be launched, and was once with what it was made for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.first = kernel, "first"

    def launch(self, stream: int) -> None:
        pass

    def rows(self, given: Any, grid: int | None = None) -> Any:
        return given or "rows"

    def __call__(self, stream: int, rows: Any, *operands: Any) -> None:
        assert rows
        self.kernel(stream, *operands)


class Gpu:
    """The fakes together, for one group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[Any, ...]] = []
        """What was asked for, in order: of the driver, of Triton, and of kernels that are launched again."""
        self.group = group_of(2)
        self.work = Work()
        self.again: Any = lambda name: kernel(self.done, f"{name} again")
        self._patch, self.patch = monkeypatch, monkeypatch.setattr
        for name in ("record", "wait", "copy"):
            monkeypatch.setattr(cuda_driver, name, lambda *given, name=name: self.done.append((name, *given)))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(fused, "compare_calls", lambda call: 0)
        monkeypatch.setattr(fused, "sm_count", lambda device: 132)
        monkeypatch.setattr(fused, "side_of", lambda work: Side(SIDE, BEFORE, AFTER, "side"))  # type: ignore[arg-type]
        monkeypatch.setattr(fused_gather, "push_in_place", lambda work, half, mp, k: self.push(4 + half))
        monkeypatch.setattr(fused, "push_of", lambda _, half, *of: self.push(half, scales=of[-1] is not None))
        from megatron_flux.kernels import launch

        monkeypatch.setattr(launch, "by_triton", self._by_triton)
        monkeypatch.setattr(launch, "first_launch", self._first_launch)
        monkeypatch.setattr(OperatorCall, "uses_tma", False)
        self.use(self.work)

    def use(self, work: Work) -> None:
        """Let calls of every purpose run on ``work``."""
        slabs: Any = {(purpose, False): work for purpose in ("gemm", "gather", "held gather", "all_reduce")}
        state_of(self.group).slabs = slabs
        self.work = work

    def backend(self, config: Any = None) -> OneWay:
        backend = OneWay(config)
        self._patch.setitem(registry._backends, "one way", backend)
        return backend

    @staticmethod
    def push(half: int, *, scales: bool = False) -> Push:
        return Push([Copy(1000 + half, 0, 64, 1, 64, 2000 + half, 4000 + half if scales else 0)], 3000 + half, 96)

    def _by_triton(self, made: Any, grid: int, *arguments: Any, **constants: Any) -> Any:
        names = made.arg_names
        optional = constants.keys() & {"num_stages"}
        assert sorted(constants) == sorted({*names[len(arguments) :], "num_warps"} | optional), "all that it takes"
        name = made.fn.__name__ if hasattr(made, "fn") else str(made)
        self.done.append(("triton", name, grid))
        return SimpleNamespace(name=name, names=names[: len(arguments)], constants=constants)

    def _first_launch(self, made: Any, grid: int, arguments: Any, constants: Any, operands: Any, device: Any) -> Any:
        compiled = self._by_triton(made, grid, *arguments, **constants)
        assert set(operands) <= set(compiled.names)
        self.operands, self.constants = operands, compiled.constants
        again = Again(self.again(compiled.name))
        again.launch(STREAM)
        return again


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    pytest.importorskip("triton")
    return Gpu(monkeypatch)
