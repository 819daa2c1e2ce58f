"""examples/ms-swift: mcore-bridge, which builds ms-swift's models, with its LoRA through peft."""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import is_patched, set_backend
from tests.distributed import recipes
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import te_megatron

pytestmark = recipes.needed("swift", "mcore-bridge==1.6.5", "peft==0.20.0", "accelerate==1.15.0")

PLUGIN = Path(__file__).parents[2] / "examples" / "ms-swift" / "flux_on.py"
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def model_of(lora: bool, sequence_parallel: bool) -> torch.nn.Module:
    """A model built by mcore-bridge, with the attention that CPUs can run, and LoRA as ms-swift adds it."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    sys.path[:0] = [path for path in (str(recipes.source("swift")),) if path not in sys.path]
    recipes.stub("datasets", "datasets.utils", "datasets.utils.filelock")
    recipes.stub("modelscope", "modelscope.hub", "modelscope.hub.utils", "modelscope.hub.utils.utils")
    bridge: Any = importlib.import_module("mcore_bridge")
    loader: Any = importlib.import_module("mcore_bridge.model.register").ModelLoader
    spec_of = loader.get_transformer_layer_spec

    def on_cpus(self: Any, **given: Any) -> Any:
        spec = spec_of(self, **given)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        return spec

    config = bridge.ModelConfig(
        hf_model_type="qwen3",
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "num_query_groups": 2},
        **{"padded_vocab_size": 64, "max_position_embeddings": 16, "variable_seq_lengths": False},
        **{"tensor_model_parallel_size": dist.get_world_size(), "sequence_parallel": sequence_parallel},
        **{"use_cpu_initialization": True, "bias_activation_fusion": False, "bias_dropout_fusion": False},
        **{"masked_softmax_fusion": False, "gradient_accumulation_fusion": False, "apply_rope_fusion": False},
        **{"persist_layer_norm": False, "add_qkv_bias": False},
    )
    with mock.patch.object(loader, "get_transformer_layer_spec", on_cpus):
        (model,) = bridge.get_mcore_model(config)
    if lora:
        peft: Any = importlib.import_module("peft")
        config = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=TARGETS)
        model = peft.get_peft_model(model, config)
    return model


def rank_trains(lora: bool, sequence_parallel: bool) -> dict[str, Any]:
    with te_megatron(dist.get_world_size()):
        model, layers, printed = recipes.compared(lambda: model_of(lora, sequence_parallel))
        found = set_backend(model, "stock", names="*.linear_qkv")
        found += set_backend(model, "stock", names="output_layer")
        return {"layers": layers, "printed": printed, "found": found}


@pytest.mark.parametrize(("lora", "sequence_parallel"), [(True, True), (True, False), (False, True)])
def test_stocks_losses(libraries_world2: WorkerPool, lora: bool, sequence_parallel: bool) -> None:
    first, second = libraries_world2.run(rank_trains, lora, sequence_parallel)
    count = 2 * (8 if lora else 4) + 1  # of an adapter's halves one is not tensor-parallel
    recipes.require_flux(first["layers"], [first["printed"], second["printed"]], count)
    prefix, wrapped = ("base_model.model.", ".base_layer") if lora else ("", "")
    qkv = [f"{prefix}decoder.layers.{i}.self_attention.linear_qkv{wrapped}" for i in range(2)]
    assert first["found"] == [*qkv, f"{prefix}output_layer"]


@on_ranks("libraries_world2")
def test_the_plugin() -> None:
    with te_megatron(dist.get_world_size()):  # which ends with stock layers
        runpy.run_path(str(PLUGIN))
        assert is_patched()
