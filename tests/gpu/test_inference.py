"""Passes without gradients on two GPUs: the layers in inference mode and a training behind it; megatron-core's dynamic
engine, stock against patched; the checks of gemm_all_reduce.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_flux import FluxConfig
from megatron_flux.comm import group_state
from tests.distributed.megatron_world import flux, gpt_model, megatron, no_random_numbers
from tests.distributed.pool import on_ranks
from tests.distributed.test_keep_gathered import Pair, check_workspaces
from tests.gpu.dynamic_engine import generated, spread_logits
from tests.gpu.paged_attention import varlen, with_kvcache
from tests.gpu.test_fused import TUNES, run_checks

pytestmark = pytest.mark.gpus(2)

ROWS, WIDTH = 128, 256


@pytest.mark.parametrize("backend", ["reference", "fused", "auto"])
@on_ranks("nccl2")
def test_a_training_behind_inference(backend: str) -> None:
    """A group whose first calls are those of inference: what they leave serves a training, prepared calls too."""
    group = dist.new_group([0, 1])
    try:
        check_workspaces(Pair(group, backend, ROWS, WIDTH))
    finally:
        torch.cuda.synchronize()
        dist.barrier()
        group_state.drop_slabs()
        dist.destroy_process_group(group)


def flash_attention() -> contextlib.AbstractContextManager[Any]:
    """Its kernels where megatron-core's dynamic engine finds them, else what they compute, in torch."""
    from megatron.core.transformer import attention
    from megatron.core.utils import is_fa_min_version

    have = importlib.util.find_spec("flash_attn") is not None and is_fa_min_version("2.7.3")
    if attention.HAVE_FA3 or have:
        return contextlib.nullcontext()
    return mock.patch.multiple(
        attention, is_fa_min_version=lambda _: True, flash_attn_varlen_func=varlen, flash_attn_with_kvcache=with_kvcache
    )


def with_sampling_behind_its_copies() -> contextlib.AbstractContextManager[Any]:
    """megatron-core 0.16.1 copies top_k and its like to the host without waiting, and reads them: in CUDA graphs the
    host is there before the copies, and samples by whatever lay there.
    """
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    name = "_dynamic_step_sample_bookkeeping"
    read = getattr(TextGenerationController, name, None)
    if read is None:
        return contextlib.nullcontext()

    def waited(self: Any) -> Any:
        torch.cuda.synchronize()
        return read(self)

    return mock.patch.object(TextGenerationController, name, waited)


@pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="megatron-core's dynamic engine needs einops")
@pytest.mark.parametrize(
    ("sequence_parallel", "graphs"), [(False, False), (True, False), (False, True)], ids=["", "split", "graphs"]
)
@pytest.mark.parametrize("backend", ["reference", "fused", "auto"])
@on_ranks("nccl2")
def test_greedy_tokens_of_the_dynamic_engine(sequence_parallel: bool, backend: str, graphs: bool) -> None:
    """Tokens of stock, of flux, and what ran. In fp16, whose logits lie closer than bf16's: no two are equal."""
    shims = contextlib.ExitStack()
    with megatron(tp=dist.get_world_size()), mock.patch.dict(os.environ), flash_attention(), shims:
        for name in [name for name in os.environ if name.startswith("NVTE_")]:
            del os.environ[name]
        os.environ["MEGATRON_FLUX_TUNE"] = "on"  # whatever all tests are told: what is not decided is counted
        if graphs:
            from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

            shims.enter_context(no_random_numbers())
            shims.enter_context(with_sampling_behind_its_copies())
            shims.callback(delete_cuda_graphs)  # else the next model's layers read what this one's leave

        def made(**more: Any) -> torch.nn.Module:
            options = {"sequence_parallel": sequence_parallel, "params_dtype": torch.float16, "fp16": True}
            return gpt_model("gpt3", **options, **more).half().eval()

        model = made()
        spread_logits(model)
        how: dict[str, Any] = {"block_size_tokens": 256}
        stock = generated(model, **how)
        if graphs:
            captured = made(cuda_graph_impl="local")
            captured.load_state_dict(model.state_dict())
            model, how = captured, {**how, "num_cuda_graphs": 2}
        with flux(FluxConfig(strict=True, backend=backend)) as seen:
            ours = [generated(model, **how) for _ in range(1 if graphs else 2)]
        assert all(tokens == stock for tokens in ours), (stock, ours)
        assert len({token for tokens in stock for token in tokens}) > 2, "always the same token: nothing is compared"
        operators = {"all_gather_gemm", "gemm_reduce_scatter"} if sequence_parallel else {"gemm_all_reduce"}
        assert {name.partition("/")[0] for name in seen.calls} == operators, seen
        assert seen.fallbacks == {}


def test_all_checks_of_gemm_all_reduce() -> None:
    """Prepared calls among them."""
    said = run_checks("checks_all_reduce.py", 2, "--seconds", "400", MEGATRON_FLUX_TIMEOUT_S="20", **TUNES)
    assert said.keys() >= {"graphs", "streams", "prepared", "tuned"}
