"""A fine-tuning's calls are tuned before its first step: of layers that return their norm's output, and of adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flux.train.fp8 import transformer_options
from tests.distributed.norm_output_cases import Adapter, Lora
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import Sizes
from tests.distributed.te_fp8_cases import needed
from tests.distributed.test_tune_ahead_fp8 import BATCH, SEQUENCE, llama, require_all_ahead

pytestmark = needed

RANK = 16


class WithAdapter(torch.nn.Module):
    """A norm and column-parallel layer in a model, with an adapter that reads the norm's output."""

    def __init__(self, layer: Any, sequence_parallel: bool) -> None:
        super().__init__()
        self.layer, size = layer, Sizes(0, 0, layer.weight.shape[1], 2 * layer.weight.shape[0])
        self.adapter = Adapter(Lora(rank=RANK, sizes=size, sequence_parallel=sequence_parallel))
        layer.return_layernorm_output = layer.return_layernorm_output_gathered = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (y, norm_output), bias = self.layer(x)
        return y + self.adapter(norm_output), bias


def adapted(sequence_parallel: bool, **options: Any) -> torch.nn.Module:
    model = llama(sequence_parallel=sequence_parallel, **options)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.decoder.layers:
        for owner, name in ((block.self_attention, "linear_qkv"), (block.mlp, "linear_fc1")):
            setattr(owner, name, WithAdapter(getattr(owner, name), sequence_parallel))
    return model


@pytest.mark.parametrize(
    ("recipe", "sequence_parallel", "chunks"),
    [
        (None, True, False),
        (None, False, False),
        ("current", True, False),
        ("blockwise", True, True),
        ("delayed", False, False),
    ],
)
def test_the_first_step_finds_every_answer(
    te_world2: WorkerPool, tmp_path: Path, recipe: Any, sequence_parallel: bool, chunks: bool
) -> None:
    options = {"sequence_parallel": sequence_parallel} | (transformer_options(recipe) if recipe else {})
    wanted = require_all_ahead(te_world2, tmp_path, recipe is not None, chunks, adapted, **options)
    adapters = {call[:4] for call in wanted if RANK in call[2:4]}
    assert {operator.partition(" ")[0] for operator, *_ in adapters} == (set() if chunks else {"gemm_all_reduce"})
    assert (("all_gather", SEQUENCE * BATCH, 0, 128) in {call[:4] for call in wanted}) == chunks
