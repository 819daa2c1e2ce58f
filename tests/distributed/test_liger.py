"""Liger-Kernel beside flux, on its released code: its vocab-parallel cross entropy behind a fused output layer, and its
tensor-parallel fused linear cross entropy instead of that layer.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, report
from tests.distributed.data import TOLERANCE, require_close, require_equal
from tests.distributed.megatron_world import flux, gpt_model, megatron, step
from tests.distributed.pool import on_ranks
from tests.distributed.twins import NEEDS_TRITON

SOURCE = Path(os.environ.get("MEGATRON_FLUX_LIGER_SOURCE") or Path(sys.prefix, "liger-source"))
pytestmark = [
    NEEDS_TRITON,
    pytest.mark.skipif(
        not (SOURCE / "liger_kernel").is_dir(),
        reason=f"needs Liger-Kernel: pip install --no-deps --target {SOURCE} liger-kernel==0.8.5",
    ),
]
STRICT = FluxConfig(strict=True, backend="reference")


def liger(module: str) -> Any:
    """Import a module of it; without transformers, which it does not need and which takes seconds."""
    if str(SOURCE) not in sys.path:
        sys.path.append(str(SOURCE))
    absent = "transformers" not in sys.modules
    if absent:
        sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(f"liger_kernel.{module}")
    finally:
        if absent:
            del sys.modules["transformers"]


@contextlib.contextmanager
def liger_cross_entropy() -> Iterator[None]:
    """Megatron's two cross entropies are Liger-Kernel's, by its own patch; undone at the end."""
    names = (
        "megatron.core.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
        "megatron.core.tensor_parallel.vocab_parallel_cross_entropy",
        "megatron.core.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
        "megatron.core.models.common.language_module.language_module.fused_vocab_parallel_cross_entropy",
    )
    with contextlib.ExitStack() as stack:
        for module, _, name in (path.rpartition(".") for path in names):
            owner = sys.modules[module]
            stack.enter_context(mock.patch.object(owner, name, getattr(owner, name)))
        liger("megatron").apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
        yield


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks("world2")
def test_the_cross_entropy_behind_a_fused_output_layer(sequence_parallel: bool) -> None:
    with megatron(dist.get_world_size()):
        model = gpt_model("llama", sequence_parallel=sequence_parallel, cross_entropy_loss_fusion=True)
        stock = step(model)["loss"]
        with liger_cross_entropy():
            expected = step(model)
            with flux(STRICT):
                require_equal(step(model), expected)
                layers = report(model)["layers"]
        assert expected.keys() == {"loss", *(name for name, _ in model.named_parameters())}
        require_close("loss", expected["loss"], stock, TOLERANCE)
        assert set(layers.values()) == {"flux"}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks("world2")
def test_the_fused_linear_cross_entropy_instead_of_the_output_layer(sequence_parallel: bool) -> None:
    """It reads ``output_layer.weight``. That layer is not called, which the report says; all others run flux."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    head = liger("ops.fused_linear_scaled_cross_entropy")
    with megatron(dist.get_world_size()):
        model = gpt_model("llama", sequence_parallel=sequence_parallel)
        stock = step(model)["loss"]
        group = parallel_state.get_tensor_model_parallel_group()

        def loss(hidden_states: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
            x = hidden_states
            if sequence_parallel:  # the head sums its dx over ranks itself
                x = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False)
            losses = head.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
                x.flatten(0, 1), model.output_layer.weight, labels.t().flatten(), group
            )
            return losses.view(x.shape[:2]).t()

        # It asks for CUDA before its own fallback in torch, which does not need it.
        with mock.patch.object(model, "_postprocess", loss), mock.patch.object(head, "_validate_tp_inputs"):
            expected = step(model)
            with flux(STRICT):
                require_equal(step(model), expected)
                layers = report(model)["layers"]
        assert expected.keys() == {"loss", *(name for name, _ in model.named_parameters())}
        require_close("loss", expected["loss"], stock, TOLERANCE)
        assert layers.pop("output_layer") == "not called"
        assert set(layers.values()) == {"flux"}
