"""A script over Megatron-Bridge: its own ``initialize_megatron`` and model provider, on one CPU."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist


def main() -> None:
    importlib.import_module("tests.distributed.te_preload")
    sys.modules["datasets"] = mock.MagicMock(__spec__=ModuleSpec("datasets", None), __path__=[])
    config: Any = importlib.import_module("megatron.bridge.training.config")
    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_flux.train.shims import cpu_shims

    provider = GPTModelProvider(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=16,
        seq_length=4,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        make_vocab_size_divisible_by=2,
        transformer_layer_spec=get_gpt_layer_local_spec(),
    )
    train = SimpleNamespace(
        rampup_batch_size=None, global_batch_size=1, micro_batch_size=1, decrease_batch_size_if_needed=False
    )
    given = SimpleNamespace(
        model=provider,
        train=train,
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(),
        rerun_state_machine=config.RerunStateMachineConfig(),
        ddp=SimpleNamespace(num_distributed_optimizer_instances=1),
        inprocess_restart=None,
        profiling=None,
        data_parallel_size=1,
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # It would run make in the folder where megatron-core is installed.
    with cpu_shims(), mock.patch.object(initialize, "compile_helpers"):
        initialize.initialize_megatron(given, allow_no_cuda=True)
        provider.finalize()
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        model = provider.provide(pre_process=True, post_process=True)
    print("built", sum(p.numel() for p in model.parameters()), "megatron.training" in sys.modules)


main()
