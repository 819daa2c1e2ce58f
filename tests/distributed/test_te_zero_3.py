"""``compare --fsdp`` over TransformerEngine's layers: ZeRO-3 has the losses of stock's tensor parallelism."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.distributed import te_stand_in
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron
from tests.distributed.test_bench_fp8 import _attention_of_the_cpu

pytestmark = te_stand_in.needed
SIZES = {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 4, "num_layers": 2, "hidden_size": 64}
GATED = {"normalization": "RMSNorm", "activation": "swiglu", "num_query_groups": 2}


def sequences(length: int) -> list[dict[str, torch.Tensor]]:
    """Some that count upwards, each from another number and by another step."""
    made = []
    for i in range(12):
        text = (7 * i + torch.arange(length + 1) * (1 + i % 3)) % 256
        mask, positions = torch.ones(length), torch.arange(length)
        made.append({"tokens": text[:-1], "labels": text[1:], "loss_mask": mask, "position_ids": positions})
    return made


def losses_and_norms(shape: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Train both three steps of two micro-batches in fp32; returns each step's loss and gradient norm."""
    import megatron.core.optimizer as optimizers
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer

    from megatron_flux.train import config, fsdp, model
    from megatron_flux.train.options import CompareOptions
    from megatron_flux.train.shims import gradient_accumulation_fusion
    from megatron_flux.train.trainer import Trainer

    given = CompareOptions(fsdp=True, lr=1e-3, steps=3, **SIZES, **shape)
    run = config.resolve(given, world_size=dist.get_world_size(), device="cpu", out=Path("none"))
    run = run.model_copy(update={"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True})
    local = {"multi_tensor_applier": utils.local_multi_tensor_applier}
    local["multi_tensor_scale_impl"] = utils.local_multi_tensor_scale
    with (
        te_megatron(dist.get_world_size()),
        gradient_accumulation_fusion(),
        # TransformerEngine's optimizer and attention are compiled.
        mock.patch.multiple(optimizers, Adam=torch.optim.AdamW, USING_PYTORCH_OPTIMIZER=True),
        mock.patch.multiple(clip_grads, l2_norm_impl=utils.local_multi_tensor_l2_norm, **local),
        mock.patch.multiple(optimizer, **local),
        mock.patch.object(model, "layer_spec", _attention_of_the_cpu(model.layer_spec)),
    ):
        dataset = sequences(run.shape.seq_length)
        stock: Any = Trainer(run, dataset, torch.device("cpu"))
        arms = {"stock": stock, "fsdp": fsdp.FsdpTrainer(run, dataset, torch.device("cpu"), stock.model)}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for _ in range(run.steps):
            for name, arm in arms.items():
                with arm.active():
                    loss_sum, tokens, norm, *_ = arm.step()
                total = torch.tensor([loss_sum, tokens], dtype=torch.float64)
                dist.all_reduce(total)
                found[name].append((float(total[0] / total[1]), norm))
    return found


@pytest.mark.parametrize("shape", [{}, GATED], ids=["layernorm-gelu-bias", "rmsnorm-swiglu-gqa"])
def test_losses_are_those_of_stock(te_world2: WorkerPool, shape: dict[str, Any]) -> None:
    for found in te_world2.run(losses_and_norms, shape):
        for own, stock in zip(found["fsdp"], found["stock"], strict=True):
            assert own == pytest.approx(stock, rel=2e-5)
        assert found["fsdp"][-1][0] < found["fsdp"][0][0] - 0.1
