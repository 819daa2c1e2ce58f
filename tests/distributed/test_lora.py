"""LoRA's adapters on whole GPTModels: gradients against tensor parallelism of 1, and what TransformerEngine drops."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import te_stand_in
from tests.distributed.data import TOLERANCE, require_close
from tests.distributed.megatron_world import flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import on_ranks
from tests.distributed.te_cases import te_megatron

RANK = 4
Gradients = dict[str, torch.Tensor]


def adapted(family: str, **options: Any) -> Any:
    """A model with random adapters, in which no gradient is zero."""
    from megatron_flux.train.lora import add_adapters

    model = gpt_model(family, **options)
    init_b = lambda weight: torch.nn.init.normal_(weight, std=0.3)  # noqa: E731
    add_adapters(model, model.config, RANK, alpha=RANK, init_b=init_b)
    return model


def whole(model: Any, values: Gradients) -> Gradients:
    """Put the ranks' shards of parameters or gradients together, as a model of one rank has them."""
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        if name not in values or not getattr(parameter, "tensor_model_parallel", False):
            found |= {name: values[name]} if name in values else {}
            continue
        shards = [torch.empty_like(values[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, values[name].contiguous())
        if model.config.gated_linear_unit and "linear_fc1" in name and "linear_in" not in name:
            shards = [shard.chunk(2)[part] for part in range(2) for shard in shards]  # gate and value of each rank
        found[name] = torch.cat(shards, dim=parameter.partition_dim)
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt3", {}),
        ("llama", {}),
        ("llama", {"sequence_parallel": False}),
        ("llama", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    ],
    ids=["gpt3", "llama", "no sequence parallelism", "recompute"],
)
@on_ranks("world2")
def test_gradients_are_those_of_one_rank(family: str, options: dict[str, Any]) -> None:
    with megatron(dist.get_world_size()):
        model = adapted(family, **options)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == model.config.num_layers * 4 * 2
        losses, stock = loss_and_gradients(model)
        with flux() as seen:
            same, ours = loss_and_gradients(model)
        assert seen.active_layers > 4 * model.config.num_layers, "no adapter runs flux"
        assert torch.equal(losses, same)
        assert ours.keys() == stock.keys() == trained
        for name, gradient in stock.items():
            assert gradient.any(), name
            assert torch.equal(ours[name], gradient), name
        gradients = whole(model, stock)
        weights = whole(model, {name: parameter.detach() for name, parameter in model.named_parameters()})
    with megatron(1):
        model = adapted(family, **{**options, "sequence_parallel": False})
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        alone, expected = loss_and_gradients(model)
        require_close("loss", losses, alone, TOLERANCE)
        for name in trained:
            require_close(name, gradients[name], expected[name], 5 * TOLERANCE)


@te_stand_in.needed
@on_ranks("te_world2")
def test_what_is_reported_upstream() -> None:
    """With the local output dx is right, with the gathered one it is zero."""
    right, dropped = pytest.approx(0, abs=1e-5), pytest.approx(1, abs=1e-5)
    script = Path(__file__).parents[2] / "docs" / "upstream" / "gathered_norm_gradient.py"
    with te_megatron(dist.get_world_size()):
        found: dict[str, float] = runpy.run_path(str(script))["errors"](torch.device("cpu"))
    assert found == {"local": right, "gathered": dropped}
