"""LoRA's adapters on whole GPTModels: gradients against TP 1."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.data import TOLERANCE, require_close
from tests.distributed.megatron_world import FULL, flux, gpt_model, megatron, of_one_rank, step
from tests.distributed.pool import on_ranks

RANK = 4


def adapted(family: str, **options: Any) -> Any:
    """A model with random adapters, in which no gradient is zero."""
    from megatron_flux.train.lora import add_adapters

    model = gpt_model(family, **options)
    init_b = lambda weight: torch.nn.init.normal_(weight, std=0.3)  # noqa: E731
    add_adapters(model, model.config, RANK, alpha=RANK, init_b=init_b)
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [("gpt3", {}), ("llama", {}), ("llama", {"sequence_parallel": False}), ("llama", FULL)],
    ids=["gpt3", "llama", "no sequence parallelism", "recompute"],
)
@on_ranks("world2")
def test_gradients_are_those_of_one_rank(family: str, options: dict[str, Any]) -> None:
    with megatron(dist.get_world_size()):
        model = adapted(family, **options)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == model.config.num_layers * 4 * 2
        stock = step(model)
        with flux() as seen:
            ours = step(model)
        assert seen.active_layers > 4 * model.config.num_layers, "no adapter runs flux"
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with megatron(1):
        model = adapted(family, **{**options, "sequence_parallel": False})
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        model.load_state_dict(of_one_rank(weights, shapes, family == "llama"), strict=False)
        expected = step(model)
        assert expected.keys() == {"loss", *trained}
        for found in (stock, ours):
            gradients = of_one_rank(found, {**shapes, "loss": stock["loss"].shape}, family == "llama")
            for name, gradient in expected.items():
                require_close(name, gradients[name], gradient, 5 * TOLERANCE)
