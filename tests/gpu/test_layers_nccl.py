"""megatron-core's linears over NCCL, patched against stock: exact on integers, and in bf16 with main_grad fusion; with
sequence parallelism and without, of few rows and of more.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_flux
from megatron_flux.train.shims import gradient_accumulation_fusion
from tests.distributed.pool import WorkerPool

pytestmark = pytest.mark.gpus(2)

S, B, H, F = 64, 2, 128, 256
FEW = 4
"""Tokens of a sequence: ``gemm_all_reduce`` has special kernels for few rows."""


def _integers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").to(dtype)


def _pair(dtype: torch.dtype, fusion: bool, sequence_parallel: bool) -> tuple[Any, Any]:
    """A column and a row layer with the same integer weights on every call."""
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
        model_parallel_cuda_manual_seed(1)
    tp = dist.get_world_size()
    config = ModelParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        gradient_accumulation_fusion=fusion,
    )
    common = {"config": config, "init_method": torch.nn.init.zeros_, "bias": True, "skip_bias_add": False}
    layers = ColumnParallelLinear(H, F, **common), RowParallelLinear(F, H, input_is_parallel=True, **common)
    for i, layer in enumerate(layers):
        for j, parameter in enumerate(layer.parameters()):
            parameter.data.copy_(_integers(*parameter.shape, seed=10 * i + j + 100 * dist.get_rank(), dtype=dtype))
        if fusion:
            layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
            layer.weight.grad_added_to_main_grad = False
    # The row layer's bias is not sharded.
    dist.broadcast(layers[1].bias.data, 0)
    return layers


def _forward_backward(
    backend: str | None, dtype: torch.dtype, fusion: bool, whole: int | None = None
) -> SimpleNamespace:
    """``backend`` None is stock; ``whole``: the sequence that every rank has, None with sequence parallelism."""
    tp, rank = dist.get_world_size(), dist.get_rank()
    with contextlib.ExitStack() as stack:
        if fusion:
            stack.enter_context(gradient_accumulation_fusion())
        if backend is not None:
            stack.enter_context(megatron_flux.patched(megatron_flux.FluxConfig(strict=True, backend=backend)))
        column, row = _pair(dtype, fusion, sequence_parallel=whole is None)
        megatron_flux.ops.stats.reset()
        x = _integers(whole or S // tp, B, H, seed=7 + (0 if whole else rank), dtype=dtype).requires_grad_()
        y, _ = row(column(x)[0].remainder(5))
        y.backward(_integers(*y.shape, seed=9 + rank, dtype=dtype))
        grads = [layer.weight.main_grad if fusion else layer.weight.grad for layer in (column, row)] + [
            column.bias.grad,
            row.bias.grad,
        ]
        return SimpleNamespace(
            values=[t.detach().cpu() for t in (y, x.grad, *grads)],
            active=megatron_flux.report()["active_layers"],
            calls=megatron_flux.report()["calls"],
            flagged=[bool(getattr(layer.weight, "grad_added_to_main_grad", False)) for layer in (column, row)],
        )


WAYS = [(backend, torch.bfloat16, whole) for backend in ("reference", "fused") for whole in (None, FEW, S)]


@pytest.mark.parametrize("fusion", [False, True], ids=["wgrad", "main_grad"])
@pytest.mark.parametrize(("backend", "dtype", "whole"), [*WAYS, ("reference", torch.float32, None)])
def test_patched_equals_stock(
    nccl2: WorkerPool, backend: str, dtype: torch.dtype, whole: int | None, fusion: bool
) -> None:
    """To the bit."""
    stock = nccl2.run(_forward_backward, None, dtype, fusion, whole)
    flux = nccl2.run(_forward_backward, backend, dtype, fusion, whole)
    for a, b in zip(stock, flux, strict=True):
        assert (a.active, b.active, a.calls) == (0, 2, {})
        assert a.flagged == b.flagged == [fusion, fusion]
        assert whole is None or b.calls == {f"gemm_all_reduce/{backend}": 2}
        for name, s, f in zip(("y", "dx", "dw1", "dw2", "db1", "db2"), a.values, b.values, strict=True):
            assert s.abs().sum() > 0, name
            assert torch.equal(s, f), name
