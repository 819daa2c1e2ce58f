"""examples/bridge: a model of Megatron-Bridge's own provider, fine-tuned whole and with its LoRA."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from megatron_flux import flux_spec, report, set_backend
from tests.distributed import recipes
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron
from tests.distributed.test_spec import process

pytestmark = recipes.needed("bridge", "megatron-bridge==0.3.1", "einops", "six")
NEWEST = (
    *("megatron-bridge==0.6.2", "megatron-core==0.19.2", "transformer-engine==2.20.2"),
    *("--ignore-requires-python", "--python-version 3.12", "--only-binary :all:"),
)


def model_of(lora: bool, sequence_parallel: bool, *, by_spec: bool = False) -> torch.nn.Module:
    provider = recipes.bridge_provider(sequence_parallel=sequence_parallel)
    if by_spec:
        provider.transformer_layer_spec = flux_spec(provider.transformer_layer_spec)
    model = provider.provide(pre_process=True, post_process=True)
    if lora:
        (model,) = recipes.import_bridge("peft.lora").LoRA(dim=8, alpha=16, dropout=0.0)([model], training=True)
    return model


def rank_trains(lora: bool, sequence_parallel: bool) -> dict[str, Any]:
    with te_megatron(dist.get_world_size()):
        model, layers, printed = recipes.compared(
            lambda: model_of(lora, sequence_parallel), tolerance=1e-5 if lora else 0
        )
        return {"layers": layers, "printed": printed, "found": set_backend(model, "stock", names="*.linear_qkv")}


@pytest.mark.parametrize(("lora", "sequence_parallel"), [(False, True), (False, False), (True, False)])
def test_stocks_losses(te_world2: WorkerPool, lora: bool, sequence_parallel: bool) -> None:
    first, second = te_world2.run(rank_trains, lora, sequence_parallel)
    recipes.require_flux(first["layers"], [first["printed"], second["printed"]], 2 * (12 if lora else 4) + 1)
    wrapped = ".to_wrap" if lora else ""
    assert first["found"] == [f"decoder.layers.{i}.self_attention.linear_qkv{wrapped}" for i in range(2)]


@recipes.needed("newest-bridge", *NEWEST)
def test_stocks_losses_over_newer_releases(newest_bridge_world2: WorkerPool) -> None:
    """Releases for Python 3.12, of which earlier ones need a name of ``typing`` alone."""
    first, second = newest_bridge_world2.run(rank_trains, True, False)
    recipes.require_flux(first["layers"], [first["printed"], second["printed"]], 2 * 12 + 1)
    assert " is on: megatron-core 0.19.2, " in first["printed"]


@pytest.mark.parametrize("lora", [False, True])
@on_ranks("te_world2")
def test_a_provider_whose_spec_runs_flux(lora: bool) -> None:
    """Adapters are megatron-core's own layers, built by Bridge."""
    with te_megatron(dist.get_world_size()), process():
        _, losses = recipes.trained(lambda: model_of(lora, False))
        model, ours = recipes.trained(lambda: model_of(lora, False, by_spec=True))
        assert all(torch.equal(a, b) for a, b in zip(ours, losses, strict=True))
        assert report()["replaced"] == []
        layers = report(model)["layers"]
    stock = {name for name, ran in layers.items() if ran == "not patched"}
    assert stock == {name for name in layers if name == "output_layer" or ".adapter." in name}
    assert [ran for name, ran in layers.items() if name not in stock] == ["flux"] * 2 * 4


@on_ranks("te_world2")
def test_a_checkpoints_configuration_names_bridges_own_spec() -> None:
    """Whoever loads the checkpoint needs no flux."""
    representers = recipes.import_bridge("utils.yaml_utils").safe_yaml_representers
    spec = recipes.import_bridge("models.gpt_provider").default_layer_spec
    for given in (spec, partial(spec)):
        with te_megatron(dist.get_world_size()), process(), representers():
            written, expected = yaml.safe_dump(flux_spec(given)), yaml.safe_dump(given)
        assert written == expected
        assert "megatron.bridge.models.gpt_provider.default_layer_spec" in written
