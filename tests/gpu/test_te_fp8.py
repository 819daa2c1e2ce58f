"""megatron-core's layers over TransformerEngine in FP8 on two GPUs, patched against stock: the ranks' checks of
tests/distributed/test_te_fp8.py with TransformerEngine's own kernels, and flux's fused ones.

Covered there and here, by recipe: operands to the bit; forward, dx and all gradients; amaxes, scales and the cached
weight after several steps; primary weights in FP8; two layers with the gather ahead. Only here: peak memory, and sums
of tensor cores. Only there: recipes that change, recompute, checkpoints.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.distributed import te_fp8_cases as cases
from tests.distributed import test_delayed_wgrad as delayed
from tests.distributed.norm_output_cases import Lora, rank_lora
from tests.distributed.pool import WorkerPool, on_ranks
from tests.distributed.te_cases import NORMS, Sizes
from tests.distributed.te_fp8_cases import GPU_SIZES, KINDS, RECIPES, fp8_case
from tests.gpu.common import peak_memory
from tests.gpu.conftest import NEEDS_TE

pytestmark = [pytest.mark.gpus(2), NEEDS_TE]


@pytest.fixture(autouse=True)
def _supported(request: pytest.FixtureRequest) -> None:
    """Skip what TransformerEngine cannot do here."""
    from transformer_engine.pytorch import quantization

    able, why = quantization.check_fp8_support()
    if able and "blockwise" in request.node.name:
        able, why = quantization.check_fp8_block_scaling_support()
    if not able:
        pytest.skip(why)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_delayed_wgrad(nccl2: WorkerPool, kind: str, recipe: str) -> None:
    # Without a bias: with one, stock's own second backward_dw fails here.
    case = fp8_case(kind, bias=False, sizes=GPU_SIZES, delayed=True, micro_batches=delayed.MICRO_BATCHES)
    for calls in nccl2.run(delayed.rank_fp8, case, recipe, "fused"):
        assert calls["all_gather_gemm/fused"] == delayed.MICRO_BATCHES


@pytest.mark.parametrize(
    ("primary", "backend"), [(False, "fused"), (True, "fused"), (False, "reference")], ids=lambda given: str(given)
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_patched_equals_stock(nccl2: WorkerPool, kind: str, recipe: str, primary: bool, backend: str) -> None:
    for calls in nccl2.run(cases.rank_fp8_case, fp8_case(kind, sizes=GPU_SIZES), recipe, 3, primary, backend):
        assert calls[f"all_gather_gemm/{backend}"] == calls[f"gemm_reduce_scatter/{backend}"] == 6


@pytest.mark.parametrize("wgrad", [None, "fused"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_multiplied_is_stocks_to_the_bit(nccl2: WorkerPool, kind: str, recipe: str, wgrad: str | None) -> None:
    """By ``fused`` what wgrad multiplies is sent transposed."""
    nccl2.run(cases.rank_operands, kind, recipe, wgrad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_without_sequence_parallelism(nccl2: WorkerPool, kind: str, recipe: str) -> None:
    case = fp8_case(kind, sizes=GPU_SIZES, options={"sequence_parallel": False})
    for calls in nccl2.run(cases.rank_fp8_case, case, recipe, 3, False, "fused"):
        assert calls == {"gemm_all_reduce/fused": 6}


@pytest.mark.parametrize(("norm", "recipe"), list(zip(NORMS, itertools.cycle(RECIPES), strict=False)))
def test_norms(nccl2: WorkerPool, norm: str, recipe: str) -> None:
    case = fp8_case("norm column", sizes=GPU_SIZES, options=NORMS[norm])
    nccl2.run(cases.rank_fp8_case, case, recipe, 2, False)


@pytest.mark.parametrize(("ahead", "backend"), [(True, "fused"), (False, "fused"), (True, "reference")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_layers(nccl2: WorkerPool, recipe: str, ahead: bool, backend: str) -> None:
    nccl2.run(cases.rank_fp8_pair, recipe, ahead, backend)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks("nccl2")
def test_peak_memory_is_not_above_stocks(kind: str, recipe: str) -> None:
    stock, ours = cases.peaks(fp8_case(kind, bias=False, sizes=Sizes(1024, 1, 4096, 8192)), recipe, peak_memory)
    dist.barrier()
    allowed = 1.1 if recipe == "blockwise" else 1.02  # in blocks 57 and 61 MiB were seen, the latter in a row's
    assert 0 < ours <= allowed * stock, f"{ours / 2**20:.1f} MiB against {stock / 2**20:.1f} MiB"


@pytest.mark.parametrize("ahead", [True, False])
@on_ranks("nccl2")
def test_a_dy_that_is_gathered_twice(ahead: bool) -> None:
    """Two layers, the row-parallel one's dy transposed behind dgrad's copies; and that layer alone, to the bit."""
    recipe = "blockwise"
    assert cases.rank_fp8_pair(recipe, ahead, "fused")["all_gather/fused"] == 6
    assert cases.rank_operands("row", recipe, "fused")["all_gather/fused"] == 2
    calls = cases.rank_fp8_case(fp8_case("row", sizes=GPU_SIZES), recipe, 3, False, "fused")
    assert calls["all_gather/fused"] == 6


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("returned", ["gathered", "local"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_norm_outputs(nccl2: WorkerPool, recipe: str, returned: str, backend: str) -> None:
    """With adapters the GEMM's operand is gathered as bytes, the adapter's in bf16 beside it."""
    lora = Lora(rank=16, sizes=Sizes(256, 2, 1024, 1536), recipe=recipe, returned=returned)
    for case in (lora, replace(lora, frozen=False, bias=True), replace(lora, recompute=True)):
        nccl2.run(rank_lora, case, backend)
