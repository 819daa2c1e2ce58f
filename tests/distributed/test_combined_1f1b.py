"""Delayed wgrad in Megatron's own schedule for experts: combined 1F1B."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_flux import FluxConfig, report
from tests.distributed import te_stand_in
from tests.distributed.data import require_equal
from tests.distributed.megatron_world import (
    BATCH,
    FAMILIES,
    SEQUENCE,
    VOCABULARY,
    _te_layer,
    batch,
    flux,
    loss_of,
    model_config,
    pipeline_stages,
    splits_on_the_host,
)
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron

pytestmark = te_stand_in.needed

EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
OPTIONS: dict[str, Any] = {
    **{"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True},
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_grouped_gemm": True},
    **{"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp64"},
    **{"moe_shared_expert_intermediate_size": 32, "overlap_moe_expert_parallel_comm": True, **EXPERTS},
}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
MICRO_BATCHES, STEPS = 4, 1


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """What the schedule asks of CUDA beside streams."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as AllToAll

    ranges = {"range_push": mock.DEFAULT, "range_pop": mock.DEFAULT, "range": mock.MagicMock()}
    with (
        mock.patch.object(AllToAll, "_maybe_dtoh_and_synchronize", splits_on_the_host),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.multiple(torch.cuda.nvtx, **ranges),
    ):
        yield


def stages(pp: int, **options: Any) -> list[torch.nn.Module]:
    """This rank's stages of a model of two layers for each stage of the pipeline, the same numbers in every run."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(123)
    torch.manual_seed(1234)
    virtual = 2 if pp > 1 else None
    config = model_config(
        **FAMILIES["llama"], **OPTIONS, num_layers=2 * pp, virtual_pipeline_model_parallel_size=virtual,
        batch_p2p_comm=True, **options,
    )  # fmt: skip
    layer, norm = _te_layer(config, {"num_experts": 4, "moe_grouped_gemm": True})
    return pipeline_stages(config, layer, norm, VOCABULARY, SEQUENCE, position_embedding_type="rope")


def forward_step(batches: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    make = model.build_schedule_plan if return_schedule_plan else model
    return make(**next(batches)), loss_of


def train(pp: int, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], dict[str, str]]:
    """Losses (on the last stage), this rank's gradients, and what its layers ran."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    models = stages(pp, **options)
    run = functools.partial(
        get_forward_backward_func(), forward_step_func=forward_step, model=models, num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
    )  # fmt: skip
    losses: list[float] = []
    for step in range(STEPS):
        batches = [map(batch, range(10 * step, 10 * step + MICRO_BATCHES)) for _ in models]
        losses += [one["loss"].item() for one in run(data_iterator=batches)]
    named = {f"{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}
    assert all(p.grad is not None for p in named.values())
    return losses, {name: p.grad for name, p in named.items()}, report(models)["layers"]


def rank_combined(pp: int, options: dict[str, Any]) -> list[float]:
    virtual = {"virtual_pipeline_model_parallel_size": 2} if pp > 1 else {}
    with te_megatron(2, pp=pp, **EXPERTS, **virtual), no_gpu():
        losses, stock, _ = train(pp, options)
        with flux(FluxConfig(strict=True, backend="reference")) as seen:
            same, ours, layers = train(pp, options)
        assert seen.fallbacks == {}
        assert set(layers.values()) == {"flux"}
        assert same == losses
        require_equal(ours, stock)
        return losses


DELAYED = {"delay_wgrad_compute": True}


@pytest.mark.parametrize("options", [DELAYED, RECOMPUTE], ids=["delayed", "recompute"])
def test_one_stage(te_world2: WorkerPool, options: dict[str, Any]) -> None:
    for losses in te_world2.run(rank_combined, 1, options):
        assert len(set(losses)) == STEPS * MICRO_BATCHES


def test_virtual_stages(te_world4: WorkerPool) -> None:
    found = te_world4.run(rank_combined, 2, DELAYED | RECOMPUTE)
    assert [len(set(losses)) for losses in found] == [0, 0, STEPS * MICRO_BATCHES, STEPS * MICRO_BATCHES]
