"""Small kernels that are compiled while the model is built are those that calls launch."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from megatron_flux.comm.slab import Slab
from megatron_flux.kernels import ahead, launch
from megatron_flux.kernels import transpose as transposes
from megatron_flux.ops import early, fused_gather

LIMIT = 600 * 10**9  # nanoseconds
GPU = torch.device("cuda", 0)


def slab() -> Any:
    """A slab of two ranks on the CPU that says that it is on a GPU."""
    words, numbers = torch.zeros(256, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    table: Any = SimpleNamespace(is_cuda=True, device=GPU, get_device=lambda: 0)
    alarm: Any = SimpleNamespace(words=torch.zeros(8, dtype=torch.int32), limit=LIMIT)
    at: Any = (2, 1, 1 << 20, False, [], [words, words], table, numbers, words, torch.ones(2, dtype=torch.int32), alarm)
    return Slab(*at, None, None)


def test_calls_launch_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[bytes] = []
    threads = SimpleNamespace(submit=lambda job: jobs.append(job) or Future())  # type: ignore[func-returns-value]
    for name, value in (("_threads", lambda: threads), ("_done", {}), ("ahead", {})):
        monkeypatch.setattr(ahead, name, value)
    monkeypatch.setattr(early, "capability", lambda device: (9, 0))
    monkeypatch.setattr(early, "compile_small_kernels", functools.cache(early.compile_small_kernels.__wrapped__))
    early.compile_small_kernels(2, GPU)
    early.compile_small_kernels(2, GPU)
    assert len(jobs) == 4
    launched: list[Any] = []
    monkeypatch.setattr(
        launch, "launch", lambda cache, key, kernel, grid, arguments, constants, *_: launched.append(
            (kernel, arguments, constants)
        )
    )  # fmt: skip
    work = slab()
    for half in (0, 1):
        launched.append((lambda of: (of.kernel, of.arguments, of.constants))(fused_gather._gather_wait(work, half)))
        monkeypatch.setattr(work, "check", lambda: None)
        work.start(half)
    for columns in (False, True):
        x = torch.zeros((64, 512) if columns else (512, 64), dtype=torch.uint8)
        transposes.transpose(x, torch.zeros(64, 1024, dtype=torch.uint8)[:, 512:], {}, columns=columns)
    assert len(launched) == 6
    for kernel, arguments, constants in launched:
        assert ahead.job_of(kernel, arguments, constants, 90) in jobs, kernel.__name__
        assert launch.key_of(kernel, arguments, constants, 0) in ahead.ahead
