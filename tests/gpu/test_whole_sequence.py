"""A GPTModel without sequence parallelism on two GPUs, in inference: stock's logits, by fused kernels, in a CUDA graph.

The layers by themselves, trained too, are in test_layers_nccl.py and test_te_layers.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, ops
from megatron_flux.ops.cuda_graphs import captured_calls
from tests.distributed.data import relative_error
from tests.distributed.megatron_world import batch, flux, gpt_model, inference, megatron, no_random_numbers
from tests.distributed.pool import WorkerPool
from tests.distributed.te_cases import te_megatron

pytestmark = pytest.mark.gpus(2)

TOLERANCE = 2**-5  # bf16, through two layers
REPLAYS = 4


def embedded(model: torch.nn.Module, given: dict[str, torch.Tensor], tokens: int) -> torch.Tensor:
    """``[tokens, b, hidden]``; outside of the graph, as in Megatron's own."""
    return model.embedding(input_ids=given["input_ids"][:, :tokens], position_ids=given["position_ids"][:, :tokens])


def logits_of(model: torch.nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``[tokens, b, vocabulary / tp]``."""
    return model.output_layer(model.decoder(hidden_states=hidden, attention_mask=mask))[0]


def rank_forward(backend: str, tokens: int, cache: Path, te: bool = False, graph: bool = True) -> dict[str, int]:
    """Stock's logits, flux's eagerly and flux's replayed with other tokens; the calls of the forward, captured if
    ``graph``. ``cache``: where the tuner keeps what it decides.
    """
    variables = {"MEGATRON_FLUX_TUNE_CACHE": str(cache / "tuned.json"), "MEGATRON_FLUX_TUNE": "on"}
    options: dict[str, Any] = {"sequence_parallel": False, "params_dtype": torch.bfloat16, "bf16": True}
    options |= {"hidden_size": 256, "ffn_hidden_size": 512}
    with (te_megatron if te else megatron)(dist.get_world_size()), mock.patch.dict(os.environ, variables):
        model = gpt_model("gpt3", te=te, **options).bfloat16().eval()
        with inference(), no_random_numbers() if graph else contextlib.nullcontext():
            return _forward(model, backend, tokens, graph)


def _forward(model: Any, backend: str, tokens: int, graph: bool) -> dict[str, int]:
    batches = [batch(seed) for seed in range(REPLAYS + 1)]
    mask = batches[0]["attention_mask"][..., :tokens, :tokens].contiguous()
    given = [embedded(model, one, tokens) for one in batches]
    stock = [logits_of(model, one, mask) for one in given]
    assert relative_error(stock[0], stock[1]) > 4 * TOLERANCE, "other tokens, the same logits: nothing is compared"
    with flux(FluxConfig(strict=True, backend=backend)) as seen:
        static = given[0].clone()
        with captured_calls() if graph else contextlib.nullcontext():
            for _ in range(3):
                eager = logits_of(model, static, mask)
        assert relative_error(eager, stock[0]) <= TOLERANCE
        ops.stats.reset()
        if not graph:
            logits_of(model, static, mask)
        else:
            torch.cuda.synchronize()
            made = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made, capture_error_mode="thread_local"):
                result = logits_of(model, static, mask)
            for repeat, (one, expected) in enumerate(zip(given, stock, strict=True)):
                static.copy_(one)
                result.fill_(float("nan"))
                if dist.get_rank() == repeat % 2:
                    torch.cuda._sleep(2_000_000)
                made.replay()
                assert relative_error(result, expected) <= TOLERANCE, f"replay {repeat}"
            torch.cuda.synchronize()
    assert (seen.active_layers, seen.fallbacks) == (9, {})
    return seen.calls


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    """Two ranks of their own."""
    with WorkerPool(2, backend="nccl") as pool:
        yield pool


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_logits_by_fused_kernels_in_a_graph(ranks: WorkerPool, tmp_path: Path, backend: str, tokens: int) -> None:
    ran = {"auto": "tuned"}.get(backend, backend)
    assert ranks.run(rank_forward, backend, tokens, tmp_path, timeout=300) == [{f"gemm_all_reduce/{ran}": 4}] * 2


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed")
def test_logits_over_transformer_engine(ranks: WorkerPool, tmp_path: Path) -> None:
    assert ranks.run(rank_forward, "fused", 4, tmp_path, True, timeout=300) == [{"gemm_all_reduce/fused": 4}] * 2
