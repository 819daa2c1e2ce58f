"""What it takes to run megatron-core itself on a machine without CUDA, in one place, and undone on exit.

megatron-core asks CUDA for its current device, its random state and its streams, and allocates with
``device="cuda"``. None of that needs a GPU: here it is answered with the CPU's own. Each entry names who asks.
Everything that computes (layers, collectives over gloo, schedules, DDP, optimizer, checkpoints) is megatron-core's.

With CUDA present the context does nothing: a GPU run is never touched by it.

Hazards: replacements are process-wide while the context is open, and the CPU has one random generator where CUDA runs
have two, so a run with dropout on the CPU does not draw the numbers that a GPU run would.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

_ABSENT = object()
_CPU = torch.device("cpu")


class _Undo:
    """Attributes replaced so far, put back in reverse order."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        for owner, name, value in reversed(self._saved):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._saved.clear()


class _CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """``device="cuda"`` literals and ``Tensor.cuda()`` mean the CPU.

    Asked by: schedules (token counts), clip_grads (norms), the optimizer (found_inf), DDP buffers, rotary embeddings.
    """

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
    """A stream, event or stream context that does nothing: CPU work is already in order.

    Asked by: DDP's communication streams, timers, checkpoint staging.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _cuda_type_name(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()`` spelled as for CUDA. Asked by: optimizer, distrib_optimizer and clip_grads compare the name."""

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        if isinstance(result, str) and result.startswith("torch.") and ".cuda." not in result:
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """Let megatron-core run on the CPU for the duration of the context; does nothing where CUDA is available."""
    if torch.cuda.is_available():
        yield
        return
    undo = _Undo()
    cuda = torch.cuda
    try:
        # GlobalMemoryBuffer, tensor_parallel.mappings and layers allocate on the current device.
        undo.replace(cuda, "current_device", lambda: _CPU)
        # The random state tracker, checkpointing of activations, training state.
        undo.replace(cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        undo.replace(cuda, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state))
        undo.replace(cuda, "manual_seed", torch.manual_seed)
        # DDP, timers, pipeline communication, checkpointing.
        undo.replace(cuda, "synchronize", lambda *args, **kwargs: None)
        for name in ("Stream", "Event", "stream", "current_stream", "default_stream"):
            undo.replace(cuda, name, _NoStream)
        undo.replace(torch.Tensor, "type", _cuda_type_name(torch.Tensor.type))

        from megatron.core.tensor_parallel import random as megatron_random

        undo.replace(
            megatron_random,
            "_get_cuda_rng_state",
            lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        )
        undo.replace(
            megatron_random,
            "_set_cuda_rng_state",
            lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        )
        # It watches for the CPU's generator moving while CUDA's is forked; here the two are one.
        undo.replace(logging.getLogger(megatron_random.__name__), "disabled", True)
        # torch switches a function mode off while a torch function runs, so backward() would recompute without it.
        run_backward = torch.autograd._engine_run_backward

        def run_backward_in_mode(*args: Any, **kwargs: Any) -> Any:
            with _CudaMeansCpu():
                return run_backward(*args, **kwargs)

        undo.replace(torch.autograd, "_engine_run_backward", run_backward_in_mode)
        with _CudaMeansCpu():
            yield
    finally:
        undo.restore()
