"""Whole GPTModels of megatron-core's TransformerEngine layer spec in FP8 by its own configuration."""

import contextlib
from typing import Any

import pytest
import torch

from tests.distributed.megatron_world import FAMILIES, flux, gpt_model, loss_and_gradients
from tests.distributed.pool import WorkerPool
from tests.distributed.te_fp8_cases import FP8, fp8_megatron, fresh, needed, state_of
from tests.distributed.test_gpt import LAYERS

pytestmark = needed

SIZES = {"hidden_size": 64, "ffn_hidden_size": 128, "bf16": True, "params_dtype": torch.bfloat16}
STEPS = 3


def rank_model(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the patched model."""
    found: list[dict[str, torch.Tensor]] = []
    with fp8_megatron():
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        for patch in (contextlib.nullcontext(), flux(FP8)):
            model_parallel_cuda_manual_seed(123)
            torch.manual_seed(1234)
            model = gpt_model(family, te=True, **SIZES, **options).bfloat16()  # position embeddings
            with patch as seen:
                for step in range(STEPS):
                    for module in model.modules():
                        if hasattr(module, "is_first_microbatch"):
                            module.is_first_microbatch = True
                    loss, gradients = loss_and_gradients(model, 7 + step)
            results = {"loss": loss, **gradients}
            for name, module in model.named_modules():
                if hasattr(module, "fp8_meta"):
                    results |= {f"{name} {key}": value for key, value in state_of(module).items() if "scaling" in key}
            found.append(results)
            fresh()
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=0.02, atol=0.01, msg=lambda m, n=name: f"{n}: {m}")
    return seen.as_dict()


@pytest.mark.parametrize(("family", "recipe"), zip(FAMILIES, ("delayed", "tensorwise"), strict=True))
def test_patched_equals_stock(te_world2: WorkerPool, family: str, recipe: str) -> None:
    options = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_amax_history_len": 4}
    for seen in te_world2.run(rank_model, family, options):
        assert (seen["active_layers"], seen["fallbacks"]) == (4 * LAYERS + 1, {})


def test_first_and_last_layers_in_bf16(te_world2: WorkerPool) -> None:
    options = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "num_layers": 3, "first_last_layers_bf16": True}
    for seen in te_world2.run(rank_model, "llama", options):
        assert (seen["active_layers"], seen["fallbacks"]) == (4 * 3 + 1, {})
