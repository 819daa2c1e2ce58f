"""Liger-Kernel beside flux, on its released code: its vocab-parallel cross entropy behind a fused output layer."""

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


def liger() -> Any:
    """Import its patch of Megatron; without transformers, which it does not need and which takes seconds."""
    if str(SOURCE) not in sys.path:
        sys.path.append(str(SOURCE))
    absent = "transformers" not in sys.modules
    if absent:
        sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("liger_kernel.megatron")
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
        liger().apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
        yield


@contextlib.contextmanager
def counted_reductions() -> Iterator[list[torch.Size]]:
    """The shapes that torch.distributed.all_reduce is called with."""
    shapes: list[torch.Size] = []
    all_reduce = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tensor.shape)
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        yield shapes


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks("world2")
def test_the_cross_entropy_behind_a_fused_output_layer(sequence_parallel: bool) -> None:
    """Its all-reduces, of a number for each token, are stock's: flux replaces linears alone."""
    with megatron(dist.get_world_size()):
        model = gpt_model("llama", sequence_parallel=sequence_parallel, cross_entropy_loss_fusion=True)
        stock = step(model)["loss"]
        with liger_cross_entropy(), counted_reductions() as shapes:
            expected = step(model)
            with flux(STRICT):
                require_equal(step(model), expected)
                layers = report(model)["layers"]
        assert expected.keys() == {"loss", *(name for name, _ in model.named_parameters())}
        losses = expected["loss"]
        require_close("loss", losses, stock, TOLERANCE)
        assert set(layers.values()) == {"flux"}
        per_token = [shape for shape in shapes if shape.numel() == losses.numel()]
        assert len(per_token) == 2 * 3, shapes  # stock's and flux's: the largest logit, the sum, and the label's
