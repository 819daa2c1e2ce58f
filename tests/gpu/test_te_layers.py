"""megatron-core's layers over TransformerEngine on GPUs, patched against stock: the ranks' checks of tests/distributed.

Covered there and here: forward, dx, the gradients of weight, bias and norm, main_grad over two micro-batches, norms to
the bit, whole models of both families (gated and not), DDP, norm outputs that adapters read. Only there: state dicts,
and what is saved for backward. Only here: peak memory. Of fp32, TransformerEngine's GEMMs take TF32 and torch's do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_delayed_wgrad as delayed
from tests.distributed import test_te_gpt as models
from tests.distributed import test_te_layers as layers
from tests.distributed.megatron_world import FAMILIES, FULL, flux
from tests.distributed.norm_output_cases import Lora, rank_lora
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import (
    CLASSES,
    NORMS,
    STRICT,
    Case,
    Sizes,
    build,
    input_of,
    rank_case,
    rank_small_bias,
    te_megatron,
)
from tests.distributed.test_offloading import rank_offloading
from tests.gpu.common import peak_memory
from tests.gpu.conftest import NEEDS_TE

pytestmark = [pytest.mark.gpus(2), NEEDS_TE]

DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float32, id="fp32")]


@pytest.mark.parametrize(
    ("bias", "skip", "fusion", "dtype"),  # every pair of values
    [
        (False, True, False, torch.bfloat16),
        (False, True, True, torch.float32),
        (True, True, True, torch.bfloat16),
        (True, True, False, torch.float32),
        (True, False, True, torch.bfloat16),
        (True, False, False, torch.float32),
    ],
)
@pytest.mark.parametrize("kind", list(CLASSES))
def test_patched_equals_stock(
    nccl2: WorkerPool, kind: str, bias: bool, skip: bool, fusion: bool, dtype: torch.dtype
) -> None:
    case = Case(kind, bias=bias, skip_bias_add=skip, fusion=fusion, dtype=dtype)
    assert nccl2.run(rank_case, case) == [layers.expected_calls(case)] * 2


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("fusion", [False, True], ids=["wgrad", "main_grad"])
@pytest.mark.parametrize("kind", list(CLASSES))
def test_without_sequence_parallelism(nccl2: WorkerPool, kind: str, fusion: bool, backend: str) -> None:
    case = Case(kind, fusion=fusion, dtype=torch.bfloat16, options=layers.WHOLE)
    assert nccl2.run(rank_case, case, backend) == [{f"gemm_all_reduce/{backend}": case.micro_batches}] * 2


@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(nccl2: WorkerPool, norm: str, dtype: torch.dtype) -> None:
    nccl2.run(rank_case, Case("norm column", dtype=dtype, options=NORMS[norm], fusion=True))
    if dtype == torch.bfloat16:
        layers.test_the_norm_is_stocks_to_the_bit.on(nccl2, norm=norm, dtype=dtype)


@pytest.mark.parametrize("kind", ["norm column", "column"])
@pytest.mark.parametrize("options", [{}, layers.WHOLE], ids=["", "whole sequence"])
def test_a_bias_below_the_last_bit(nccl2: WorkerPool, kind: str, options: dict[str, Any]) -> None:
    nccl2.run(rank_small_bias, kind, options)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        *((kind, n) for kind in CLASSES for n in (0, 3)),
        *((kind, n) for kind in CLASSES if kind != "row" for n in (2, 5)),
    ],
)
def test_delayed_wgrad(nccl2: WorkerPool, kind: str, number: int, backend: str) -> None:
    """Without a bias, or with one that the GEMM adds: with another, stock's own second ``backward_dw`` fails here."""
    case = delayed.delayed(kind, number, dtype=torch.bfloat16)
    for calls in nccl2.run(delayed.rank_case, case, backend):
        assert calls[f"all_gather_gemm/{backend}"] == calls[f"gemm_reduce_scatter/{backend}"] == delayed.MICRO_BATCHES


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_offloaded_activations(nccl2: WorkerPool, sequence_parallel: bool, backend: str) -> None:
    """In Megatron's scripts TransformerEngine must be told of its older offloading: ``v1``."""
    nccl2.run(rank_offloading, True, sequence_parallel, True, backend)


def test_data_parallel_with_main_grad(nccl2: WorkerPool) -> None:
    models.test_data_parallel_with_main_grad.on(nccl2)


# Memory


@pytest.mark.parametrize("kind", list(CLASSES))
@on_ranks("nccl2")
def test_peak_memory_is_not_above_stocks(kind: str) -> None:
    case = Case(kind, skip_bias_add=True, fusion=True, dtype=torch.bfloat16, sizes=Sizes(1024, 1, 4096, 8192))
    with te_megatron(dist.get_world_size()):
        layer, x = build(case), input_of(case, 1).requires_grad_()

        def step() -> None:
            y, _ = layer(x)
            y.backward(torch.ones_like(y))
            x.grad = None
            layer.zero_grad(set_to_none=True)

        stock = peak_memory(step)
        with flux(STRICT):
            ours = peak_memory(step)
    assert 0 < ours <= 1.02 * stock, f"{ours / 2**20:.1f} MiB against {stock / 2**20:.1f} MiB"


# Whole models


@pytest.mark.parametrize("options", [{}, FULL], ids=["", "recompute"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_models(nccl2: WorkerPool, family: str, options: dict[str, Any]) -> None:
    """In fp32, which runs stock's operators on GPUs and says so."""
    why = "operators: reference instead of tuned: it needs bf16, fp16 or FP8, x is torch.float32"
    for seen in nccl2.run(models.rank_model, family, options):
        assert (seen["active_layers"], [*seen["fallbacks"]]) == (4 * models.LAYERS + 1, [why])


# Norm outputs that adapters read

LORA = Lora(rank=16, sizes=Sizes(256, 2, 1024, 1536))


@pytest.mark.parametrize("backend", ["reference", "fused", "auto"])
@pytest.mark.parametrize("returned", ["gathered", "local"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_norm_outputs(nccl2: WorkerPool, frozen: bool, returned: str, backend: str) -> None:
    """Gradients are those of TP 1: TransformerEngine itself drops one of a gathered output."""
    whole = replace(LORA, sequence_parallel=False)
    for lora in (LORA, replace(LORA, recompute=True), replace(LORA, bias=True, rms=False, skip_bias_add=True), whole):
        nccl2.run(rank_lora, replace(lora, frozen=frozen, returned=returned), backend)
