"""Whole GPTModels of megatron-core's TransformerEngine layer spec, patched against stock, on its own Python."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FallbackError, FluxConfig, report, set_backend
from tests.distributed import te_stand_in, test_gpt
from tests.distributed.data import require_close
from tests.distributed.megatron_world import FAMILIES, Seen, batch, flux, gpt_model, loss_and_gradients
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import STRICT, model_tolerance, te_megatron
from tests.distributed.test_gpt import LAYERS, expected_calls

pytestmark = te_stand_in.needed


def rank_model(family: str, options: dict[str, Any]) -> dict[str, Any]:
    return test_gpt.rank_model(family, False, {"te": True, **options}, model_tolerance())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_gradients(te_world: WorkerPool, family: str) -> None:
    expected = Seen(4 * LAYERS + 1, {}, expected_calls(LAYERS)).as_dict()
    assert te_world.run(rank_model, family, {}) == [expected] * te_world.size


@on_ranks("te_world2")
def test_data_parallel_with_main_grad() -> None:
    """DDP's hooks see a gradient for every parameter, and main_grad holds the sum over the micro-batches."""
    from megatron_flux.train.shims import gradient_accumulation_fusion

    def train() -> dict[str, torch.Tensor]:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(123)
        torch.manual_seed(1234)
        model = gpt_model("gpt3", te=True, gradient_accumulation_fusion=True)
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        parallel = DistributedDataParallel(model.config, config, model)
        for step in range(2):
            parallel.zero_grad_buffer()
            for i in range(3):
                with parallel.no_sync() if i < 2 else torch.enable_grad():
                    parallel(**batch(10 * step + i)).float().mean().backward()
            parallel.finish_grad_sync()
        assert all(p.grad is None for p in model.parameters())
        return {name: p.main_grad.clone() for name, p in model.named_parameters()}

    with te_megatron(dist.get_world_size()), gradient_accumulation_fusion():
        stock = train()
        with flux(STRICT):
            ours = train()
        for name, gradient in stock.items():
            assert gradient.any(), name
            require_close(name, ours[name], gradient, model_tolerance())


def swiglu(x: torch.Tensor, quantizer: None) -> torch.Tensor:
    assert quantizer is None
    gate, value = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


def dswiglu(dy: torch.Tensor, x: torch.Tensor, quantizer: None) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(swiglu(x, None), x, dy)[0]


@on_ranks("te_world2")
def test_mlps_of_the_op_fuser_run_stock_and_are_counted() -> None:
    """It takes the parameters of FC1 and FC2, and calls neither."""
    from megatron_flux.patch.reasons import OP_FUSER

    with te_megatron(dist.get_world_size()):
        import transformer_engine_torch

        model = gpt_model("llama", te=True, spec={"use_te_op_fuser": True})
        with mock.patch.multiple(transformer_engine_torch, swiglu=swiglu, dswiglu=dswiglu):
            losses, gradients = loss_and_gradients(model)
            with flux() as seen:
                same, ours = loss_and_gradients(model)
                layers = report(model)["layers"]
            assert torch.equal(same, losses)
            for name, gradient in gradients.items():
                assert torch.equal(ours[name], gradient), name
            with flux(FluxConfig(strict=True)), pytest.raises(FallbackError, match="op fuser"):
                loss_and_gradients(model)
            set_backend(model, "stock", names="*.mlp.*")
            with flux(STRICT):
                loss_and_gradients(model)
        assert seen.fallbacks == {f"TE norm column: {OP_FUSER}": LAYERS, f"TE row: {OP_FUSER}": LAYERS}
        assert {name for name, ran in layers.items() if ran == f"stock: {OP_FUSER}"} == {
            f"decoder.layers.{i}.mlp.{name}" for i in range(LAYERS) for name in ("linear_fc1", "linear_fc2")
        }
        assert sorted(layers.values()).count("flux") == 2 * LAYERS + 1
