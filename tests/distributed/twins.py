"""The fused backend on the CPU twin, for tests: small plans, calls that are registered, captured or without TMA."""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux.ops.backends import registry
from megatron_flux.ops.kernel_config import KernelConfig
from megatron_flux.ops.tuner import trial

NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TINY: dict[str, Any] = {"bm": 16, "bn": 32, "bk": 16}
PLANS = {"halves of tiles": KernelConfig(**TINY), "whole tiles": KernelConfig(**TINY, split=False, reducers=2, band=2)}


def twin(config: KernelConfig | None = None) -> Any:
    """The backend on CPU tensors; the pool has switched Triton's interpreter on."""
    from megatron_flux.ops.backends.fused import FusedBackend

    backend = FusedBackend("twin", twin=True)
    backend.config = config
    return backend


@contextlib.contextmanager
def registered(config: KernelConfig | None = None) -> Iterator[Any]:
    """Let operators find the backend under the name ``twin``."""
    backend = twin(config)
    with mock.patch.dict(registry._backends, {"twin": backend}):
        yield backend


def integers(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """-1, 0 and 1 of torch's own generator: other numbers in every call."""
    return torch.randint(-1, 2, (rows, cols)).to(dtype)


@contextlib.contextmanager
def one_capture(number: int | None) -> Iterator[None]:
    """Run calls as the replay of a graph of them would: it is entered once, and begins with half 0."""
    from megatron_flux.comm import slab
    from megatron_flux.ops.cuda_graphs import captured_calls

    with captured_calls(), mock.patch.object(slab, "capture_id", return_value=number):
        yield


def turns_take(ms: Callable[[trial.Trial, int], float], patch: pytest.MonkeyPatch) -> None:
    """Let a turn of a tuner's trial take ``ms(trial, candidate)``, whatever runs."""

    def begun(one: trial.Trial, candidate: int, rows: int, cuda: bool) -> Callable[[], None]:
        one._samples.append(sample := trial.Sample(candidate, rows, ms(one, candidate)))
        return lambda: setattr(sample, "ended", 0.0)

    patch.setattr(trial.Trial, "begin", begun)
    patch.setattr(trial, "_between", lambda begun, ended: begun)


def use_tma(tma: bool) -> None:
    """Let kernels have descriptors, or pointers."""
    from megatron_flux.ops import device

    os.environ["MEGATRON_FLUX_TWIN_TMA"] = str(int(tma))
    device.has_tma.cache_clear()
