"""megatron-core's parallel state in a pool worker, and models and layers small enough for it.

The parallel state is kept from one test to the next while it is the same: megatron-core makes dozens of process groups
for it, and does not end them, so that making it anew for every test would leave thousands of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megatron_flux import FluxConfig, ops, patched, report, unpatch
from megatron_flux.train.cpu_shims import cpu_shims

_layout: dict[str, int] | None = None


@contextlib.contextmanager
def megatron(tp: int, pp: int = 1, **more: int) -> Iterator[None]:
    """Parallel state with ``tp`` and ``pp``, seeds set, CPU shims installed, layers stock before and after."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with cpu_shims():
        _lay_out({"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more})
        try:
            model_parallel_cuda_manual_seed(123)
            torch.manual_seed(1234)
            yield
        finally:
            unpatch()


def _lay_out(layout: dict[str, int]) -> None:
    from megatron.core import parallel_state

    global _layout
    if layout == _layout:
        return
    if _layout is not None:
        _layout = None
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**layout)
    _layout = layout


def model_config(**options: Any) -> Any:
    """A small ``TransformerConfig`` with everything that needs Apex, TransformerEngine or CUDA off."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    tp = parallel_state.get_tensor_model_parallel_world_size()
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "sequence_parallel": tp > 1,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**defaults, **options})


@dataclass
class Seen:
    """What the patch did inside :func:`flux`."""

    active_layers: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def flux(config: FluxConfig | None = None) -> Iterator[Seen]:
    """Patched, with the counters starting from zero; the yielded object is filled in on exit."""
    seen = Seen()
    ops.stats.reset()
    with patched(config):
        try:
            yield seen
        finally:
            now = report()
            seen.active_layers, seen.fallbacks, seen.calls = now["active_layers"], now["fallbacks"], now["calls"]
