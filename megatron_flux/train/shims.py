"""Stand-ins for what megatron-core takes from CUDA, Apex and TransformerEngine; undone on exit.

Hazards: replacements are process-wide while a context is open, and the CPU has one random generator where CUDA runs
have two, so a run with dropout on the CPU does not draw the numbers that a GPU run would.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_flux.layers.backward import accumulate, apex_kernel

_CPU = torch.device("cpu")


class _CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Makes ``device="cuda"`` and ``Tensor.cuda()`` mean the CPU, for schedules, optimizer, DDP and others."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


class _NoStream:
    """A stream, event or stream context that does nothing: CPU work is already in order. For DDP and timers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """Let megatron-core run on the CPU inside the context; does nothing where CUDA is available.

    The CPU answers for the current device, the random state and streams, and allocates for ``device="cuda"``.
    Everything that computes (layers, collectives over gloo, DDP, optimizer, checkpoints) is megatron-core's.
    """
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random as megatron_random

    stock_type, run_backward = torch.Tensor.type, torch.autograd._engine_run_backward

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Name CUDA types, for optimizer, distrib_optimizer and clip_grads."""
        result = stock_type(self, *args, **kwargs)
        return re.sub(r"^torch\.(?!cuda)", "torch.cuda.", result) if isinstance(result, str) else result

    def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        """Run backward in the mode: torch switches it off while a torch function runs, and would recompute without."""
        with _CudaMeansCpu():
            return run_backward(*args, **kwargs)

    with (
        mock.patch.multiple(
            torch.cuda,
            # GlobalMemoryBuffer, tensor_parallel.mappings and layers allocate on the current device.
            current_device=lambda: _CPU,
            # The random state tracker, checkpointing of activations, training state.
            get_rng_state=lambda device="cuda": torch.get_rng_state(),
            set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
            manual_seed=torch.manual_seed,
            # DDP, timers, pipeline communication, checkpointing.
            synchronize=lambda *args, **kwargs: None,
            Stream=_NoStream,
            Event=_NoStream,
            stream=_NoStream,
            current_stream=_NoStream,
            default_stream=_NoStream,
        ),
        mock.patch.object(torch.Tensor, "type", cuda_type),
        mock.patch.multiple(
            megatron_random,
            _get_cuda_rng_state=lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
            _set_cuda_rng_state=lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        ),
        # It watches for the CPU's generator moving while CUDA's is forked; here the two are one.
        mock.patch.object(logging.getLogger(megatron_random.__name__), "disabled", True),
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward_in_mode),
        _CudaMeansCpu(),
    ):
        yield


@contextlib.contextmanager
def gradient_accumulation_fusion() -> Iterator[None]:
    """Let stock layers accumulate wgrad into ``main_grad`` without Apex; does nothing where Apex is installed.

    Stock layers refuse to be built without Apex's ``fused_weight_gradient_mlp_cuda``. Flux layers do not need it, so a
    comparison would let flux win by the missing kernel alone. Here stock gets the same accumulating GEMM.
    """
    if apex_kernel() is not None:
        yield
        return
    from megatron.core.tensor_parallel import layers

    def add(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        accumulate(main_grad, dy, x)

    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    with mock.patch.multiple(
        layers, create=True, fused_weight_gradient_mlp_cuda=kernels, _grad_accum_fusion_available=True
    ):
        yield


class SequenceParallelNorm:
    """Makes a ``torch.nn.LayerNorm`` or ``RMSNorm`` over ``[s/tp, b, h]`` as ``config.normalization`` says.

    megatron-core's ``WrappedTorchNorm`` refuses sequence parallelism. Ranks see their own tokens alone:
    ``finalize_model_grads`` sums the gradients of parameters with ``sequence_parallel`` set.
    """

    def __new__(  # type: ignore[misc]
        cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> torch.nn.Module:
        """``unused``: hints of megatron-core's other norms (persistent kernels and the like)."""
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma needs TransformerEngine's norm")
        kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        norm = kind(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        norm.returns_residual = False  # read by megatron-core from 0.17 on
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
