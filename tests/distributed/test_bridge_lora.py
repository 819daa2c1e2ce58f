"""LoRA of Megatron-Bridge, as users have it, over a GPTModel of TransformerEngine's layers: all linears run flux."""

import importlib
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, report
from tests.distributed import recipes, te_stand_in
from tests.distributed.megatron_world import flux, gpt_model, loss_and_gradients, megatron
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron

SOURCE = recipes.source("bridge") / "megatron" / "bridge"
pytestmark = recipes.needed("bridge", "megatron-bridge==0.3.1")

Tensors = dict[str, torch.Tensor]
LORA = {"dim": 8, "alpha": 16, "dropout": 0.0}


def adapted(family: str, targets: list[str] | None, options: dict[str, Any]) -> torch.nn.Module:
    """A model with frozen weights and adapters, all of its parameters random; the sharded ones of each rank differ."""
    if "megatron.bridge" not in sys.modules:
        package = types.ModuleType("megatron.bridge")
        package.__path__ = [str(SOURCE)]
        sys.modules["megatron.bridge"] = package
        sys.path.append(te_stand_in.SOURCE)  # it asks for TransformerEngine's version
    lora = importlib.import_module("megatron.bridge.peft.lora").LoRA
    more = {} if targets is None else {"target_modules": targets}
    model = gpt_model(family, te=True, **({"num_query_groups": 2} | options))
    (model,) = lora(**LORA, **more)([model], training=True)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            of_rank = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(1000 + i + 100_000 * of_rank)
            start = 1.0 if name.endswith(("layernorm.weight", "layer_norm_weight")) else 0.0
            parameter.copy_(start + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def whole(t: torch.Tensor, name: str, like: torch.Size) -> torch.Tensor:
    """A parameter or its gradient as one rank would hold it, with the shape ``like``."""
    if t.shape == like:
        return t
    dim = next(i for i, (mine, all_ranks) in enumerate(zip(t.shape, like, strict=True)) if mine != all_ranks)
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    if "linear_fc1" in name and dim == 0 and "linear_in" not in name:  # gate and up of each rank's half
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(parts, dim)


def error(found: Tensors, want: Tensors) -> float:
    """The largest difference of a gradient, relative to its largest number."""
    assert found.keys() == want.keys()
    return max(float((found[name] - g).abs().max() / g.abs().max()) for name, g in want.items())


def rank_lora(targets: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of stock's and flux's gradients against TP 1, and what ran."""
    tp, family = dist.get_world_size(), "llama"
    with te_megatron(tp):
        model = adapted(family, targets, options)
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss, stock = loss_and_gradients(model)
        with flux(FluxConfig(strict=True, backend="reference")):
            ours_loss, ours = loss_and_gradients(model)
            said = report(model)
        assert torch.equal(ours_loss, loss)
    with megatron(1):
        model = adapted(family, targets, {**options, "sequence_parallel": False})
        shapes = {name: p.shape for name, p in model.named_parameters()}

        def gather(found: Tensors) -> Tensors:
            return {name: whole(t, name, shapes[name]) for name, t in found.items()}

        parameters = gather(parameters)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name])
        _, want = loss_and_gradients(model)
    layers = set(said["layers"].values())
    errors = error(gather(stock), want), error(gather(ours), want)
    return {"errors": errors, "layers": layers, "added": said["norm_gradients"]["added"]}


WHOLE = {"sequence_parallel": False}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("targets", "options", "returned"),
    [
        (None, {}, 4),
        (["linear_qkv"], {}, 2),  # NVIDIA's recipes for H100
        (None, RECOMPUTE, 4),
        (None, WHOLE, 0),
    ],
    ids=["all linears", "qkv alone", "recompute", "no sequence parallelism"],
)
def test_gradients_are_those_of_tp_1(
    te_world2: WorkerPool, targets: list[str] | None, options: dict[str, Any], returned: int
) -> None:
    for found in te_world2.run(rank_lora, targets, options):
        stock, ours = found["errors"]
        assert ours < 1e-4
        assert (stock > 0.1) == bool(returned), "TransformerEngine drops the gradient of a gathered norm output"
        assert found["layers"] == {"flux"}
        assert found["added"] == returned
