"""LoRA of Megatron-Bridge, as users have it, over a GPTModel of TransformerEngine's layers: all linears run flux."""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, patch, report, unpatch
from megatron_flux.patch import adapters
from tests.distributed import recipes
from tests.distributed.megatron_world import FULL, flux, gpt_model, loss_and_gradients, megatron, of_one_rank
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron

pytestmark = recipes.needed("bridge", "megatron-bridge==0.3.1")

Tensors = dict[str, torch.Tensor]
LORA = {"dim": 8, "alpha": 16, "dropout": 0.0}


def adapted(targets: list[str] | None, options: dict[str, Any]) -> torch.nn.Module:
    """A model with frozen weights and adapters, all of its parameters random; the sharded ones of each rank differ."""
    lora = recipes.import_bridge("peft.lora").LoRA
    more = {} if targets is None else {"target_modules": targets}
    model = gpt_model("llama", te=True, **({"num_query_groups": 2} | options))
    (model,) = lora(**LORA, **more)([model], training=True)
    recipes.random_parameters(model, 0.3)
    return model.train()


def error(found: Tensors, want: Tensors) -> float:
    """The largest difference of a gradient, relative to its largest number."""
    assert found.keys() == want.keys()
    return max(float((found[name] - g).abs().max() / g.abs().max()) for name, g in want.items())


def rank_lora(targets: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of stock's and flux's gradients against TP 1, and what ran."""
    with te_megatron(dist.get_world_size()):
        model = adapted(targets, options)
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss, stock = loss_and_gradients(model)
        with flux(FluxConfig(strict=True, backend="reference")):
            ours_loss, ours = loss_and_gradients(model)
            said = report(model)
        assert torch.equal(ours_loss, loss)
    with megatron(1):
        model = adapted(targets, {**options, "sequence_parallel": False})
        shapes = {name: p.shape for name, p in model.named_parameters()}
        model.load_state_dict(of_one_rank(parameters, shapes, True), strict=False)
        _, want = loss_and_gradients(model)
    errors = [error(of_one_rank(found, shapes, True), want) for found in (stock, ours)]
    return {"errors": errors, "layers": set(said["layers"].values()), "added": said["norm_gradients"]["added"]}


WHOLE = {"sequence_parallel": False}


@pytest.mark.parametrize(
    ("targets", "options", "returned"),
    [
        (None, {}, 4),
        (["linear_qkv"], {}, 2),  # NVIDIA's recipes for H100
        (None, FULL, 4),
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


@on_ranks("te_world2")
def test_adapters_that_are_imported_later() -> None:
    """``patch()`` at the top of a script reaches them as they are built."""
    name = "megatron.bridge.peft.lora_layers"
    with te_megatron(dist.get_world_size()):
        layers: Any = recipes.import_bridge("peft.lora_layers")
        stock = layers.LoRALinear.forward
        with mock.patch.dict(sys.modules), flux(FluxConfig(strict=True, backend="reference")):
            if name in sys.modules:  # patched at once
                unpatch()
                del sys.modules[name]
                patch(FluxConfig(strict=True, backend="reference"))
            assert layers.LoRALinear.forward is stock
            sys.modules[name] = layers
            adapted(["linear_qkv"], {})
            assert f"{name}.LoRALinear.forward" in report()["replaced"]
            assert layers.LoRALinear.forward is not stock
        assert layers.LoRALinear.forward is stock


@on_ranks("te_world2")
def test_adapters_of_other_code_run_by_their_linears() -> None:
    path = "megatron.bridge.peft.utils:ParallelLinearAdapter.forward"
    with te_megatron(dist.get_world_size()):
        layers: Any = recipes.import_bridge("peft.lora_layers")
        stock = layers.LoRALinear.forward
        adapters._is_known.cache_clear()
        with mock.patch.dict(adapters.BRIDGE_SEAMS, {path: ("0", "1")}), flux():
            assert layers.LoRALinear.forward is stock
        adapters._is_known.cache_clear()
        with flux():
            assert layers.LoRALinear.forward is not stock


@on_ranks("te_world2")
def test_a_subclass_with_a_step_of_its_own() -> None:
    with te_megatron(dist.get_world_size()):
        layers: Any = recipes.import_bridge("peft.lora_layers")

        class Doubled(layers.LoRALinear):  # type: ignore[misc]
            def base_linear_forward(self, *args: Any, **kwargs: Any) -> Any:
                y, *others = super().base_linear_forward(*args, **kwargs)
                return 2 * y, *others

        model = adapted(None, WHOLE)
        for module in model.modules():
            if type(module) is layers.LoRALinear:
                module.__class__ = Doubled
        loss, stock = loss_and_gradients(model)
        with flux(FluxConfig(strict=True, backend="reference")):
            ours_loss, ours = loss_and_gradients(model)
        assert torch.equal(ours_loss, loss)
        assert error(ours, stock) < 1e-4
