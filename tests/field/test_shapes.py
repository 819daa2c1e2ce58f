"""Shapes that change, that are small and that nobody has tuned for: real layers of megatron-core on real ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from megatron_flux import FluxConfig
from tests.distributed.megatron_world import gpt_model
from tests.distributed.pool import WorkerPool
from tests.field.same import both, fused_kernels, over_host_memory

CHUNKED = FluxConfig(backend="chunked", strict=True, keep_gathered=False)
NEW_EVERY_STEP: list[tuple[int, ...]] = [(3, 5), (16,), (1, 1), (7, 2, 1), (4,)]


def packed_sequences() -> dict[str, Any]:
    # Megatron wants the dispatcher of a model without experts, too.
    options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    with over_host_memory():
        return both(lambda: gpt_model("gpt3", **options), NEW_EVERY_STEP, CHUNKED, tolerance=1e-5, tp=2)


def test_another_number_of_tokens_in_every_step(world2: WorkerPool) -> None:
    """NVIDIA/Megatron-LM#1238, NVIDIA/TransformerEngine#1303: userbuffers want one constant sequence length."""
    for seen in world2.run(packed_sequences):
        n = len(NEW_EVERY_STEP)
        assert seen["calls"] == {
            "all_gather_gemm/chunked": 9 * n, "gemm_reduce_scatter/chunked": 9 * n, "all_gather/chunked": 5 * n
        }  # fmt: skip
        assert seen["fallbacks"] == {}


def fused_packed_sequences() -> dict[str, Any]:
    def build() -> Any:
        return gpt_model("llama", num_layers=1, params_dtype=torch.bfloat16, bf16=True).bfloat16()

    with fused_kernels() as config:  # they add in fp32, stock's collectives in bf16
        return both(build, [(3, 5), (1, 1)], config, tolerance=2**-5, tp=2)["calls"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_kernels_take_few_and_changing_tokens(world2: WorkerPool) -> None:
    """bytedance/flux#43, #111: at m = 64 slower than torch, or refused; here down to one row a rank."""
    for calls in world2.run(fused_packed_sequences):
        assert calls == {"all_gather_gemm/twin": 10, "gemm_reduce_scatter/twin": 10, "all_gather/twin": 6}


def one_token_a_rank() -> dict[str, Any]:
    with over_host_memory():
        return both(lambda: gpt_model("llama"), [(2,), (1, 1)], CHUNKED, tolerance=1e-5, tp=2)


def test_one_token_a_rank(world2: WorkerPool) -> None:
    """bytedance/flux#111, pytorch/pytorch#179770: small m; the tuner takes stock where that is faster (tests/gpu)."""
    for seen in world2.run(one_token_a_rank):
        assert seen["calls"]["all_gather_gemm/chunked"] == 2 * 9
        assert seen["fallbacks"] == {}
