#!/usr/bin/env python3
"""Run an unmodified Megatron-LM script, or its unit tests, on CPU processes over gloo: a tool for tests, not a product.

    torchrun --nproc-per-node 2 scripts/megatron_lm_on_cpu.py pretrain_gpt.py --tensor-model-parallel-size 2 ...
    torchrun --nproc-per-node 2 scripts/megatron_lm_on_cpu.py -m megatron_flux.run pretrain_gpt.py ... --flux
    torchrun --nproc-per-node 2 scripts/megatron_lm_on_cpu.py -m pytest tests/unit_tests/tensor_parallel

Megatron-LM asks for CUDA in many places that need none. They are answered here with the CPU's own, for both stock and
flux: what computes (layers, collectives, optimizer, schedules) stays Megatron's. It refuses to run beside a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
import typing
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

# Megatron-LM demands it for sequence parallelism before Blackwell; torch.compile would compile for minutes.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# megatron-core 0.15 builds a CUDA extension on import if it finds nvcc; without a GPU torch needs to be told for which.
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")

import torch
import torch.distributed as dist
from typing_extensions import override

from megatron_flux.train.shims import SequenceParallelNorm, cpu_shims, gradient_accumulation_fusion

_CPU = torch.device("cpu")
if not hasattr(typing, "override"):  # Megatron-LM 0.19 takes it from here, where Python 3.11 does not have it
    typing.override = override  # type: ignore[attr-defined]


class _Properties:
    """What Megatron-LM reads of a device: an architecture below Blackwell, where it takes the ordinary paths."""

    major, minor, total_memory, name, multi_processor_count = 9, 0, 80 << 30, "cpu", 1


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _to_cpu(argument: Any) -> Any:
    """``argument`` of ``Tensor.to``, with a CUDA device replaced."""
    if isinstance(argument, str) and argument.startswith("cuda"):
        return _CPU
    if isinstance(argument, torch.device) and argument.type == "cuda":
        return _CPU
    return argument


def _answer_for_cuda() -> None:
    """What Megatron-LM's scripts ask of ``torch.cuda`` beyond what megatron-core asks."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.get_device_properties = lambda *args, **kwargs: _Properties
    cuda.get_device_capability = lambda *args, **kwargs: (_Properties.major, _Properties.minor)
    cuda.get_device_name = lambda *args, **kwargs: _Properties.name
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    for name in ("set_device", "manual_seed_all", "empty_cache", "reset_peak_memory_stats", "init", "_lazy_init"):
        setattr(cuda, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(cuda, name, _zero)
    torch.accelerator.current_accelerator = _nothing  # asked by torch's own optimizers; a CUDA build would say CUDA
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    tensor_to = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **kwargs: tensor_to(self, *map(_to_cpu, args), **kwargs)
    torch.nn.Module.cuda = lambda self, device=None: self

    init_process_group = dist.init_process_group
    new_group = dist.new_group

    def over_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init_process_group("gloo", *args[1:], **{k: v for k, v in kwargs.items() if k != "backend"})

    def group_over_gloo(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend", None)
        kwargs.pop("pg_options", None)
        return new_group(*args, **kwargs)

    dist.init_process_group = over_gloo
    dist.new_group = group_over_gloo


def _replace_in_megatron() -> None:
    """A norm that runs under sequence parallelism, nothing of TransformerEngine, no CUDA extensions to compile."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import (
        dot_product_attention,
        multi_latent_attention,
        multi_token_prediction,
        transformer_block,
    )
    from megatron.core.transformer.moe import moe_utils

    backends.LNImpl = backends.WrappedTorchNorm = SequenceParallelNorm
    transformer_block.LayerNormImpl = gpt_layer_specs.LNImpl = SequenceParallelNorm
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 reads it, and has it with TransformerEngine only
        moe_utils.te_general_gemm = None
    # Latent attention names the sizes of keys and values, which TransformerEngine's attention takes alone; this one
    # needs neither where a value is as large as kv_channels.
    attention = dot_product_attention.DotProductAttention
    made = attention.__init__
    attention.__init__ = lambda self, *args, k_channels=None, v_channels=None, **kw: made(self, *args, **kw)
    multi_latent_attention.HAVE_TE = HAVE_TE  # 0.16 takes it to be there
    # 0.20 compares with classes that are None without TransformerEngine.
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        multi_token_prediction.is_inference_column_parallel_linear = lambda module: False
    if HAVE_TE:  # its attention needs a GPU
        TESpecProvider.core_attention = lambda self: attention
    legacy = types.ModuleType("megatron.legacy.fused_kernels")
    legacy.load = _nothing
    sys.modules[legacy.__name__] = legacy
    # The flush of the pipeline imports Apex's kernel itself. It gets the one of gradient_accumulation_fusion.
    drain, kernels = schedules.drain_embedding_wgrad_compute, layers.fused_weight_gradient_mlp_cuda

    def drain_on_cpu(*args: Any, **kwargs: Any) -> None:
        with mock.patch.dict(sys.modules, {"fused_weight_gradient_mlp_cuda": kernels}):
            drain(*args, **kwargs)

    schedules.drain_embedding_wgrad_compute = drain_on_cpu


def main(words: list[str]) -> None:
    """Run ``SCRIPT arguments`` or ``-m MODULE arguments``."""
    if torch.cuda.is_available():
        sys.exit("megatron_lm_on_cpu.py: this machine has a GPU; run the script itself")
    if not words or words == ["-m"]:
        sys.exit("usage: megatron_lm_on_cpu.py [-m] SCRIPT_OR_MODULE [arguments]")
    as_module = words[0] == "-m"
    target, sys.argv = (words[1], words[1:]) if as_module else (words[0], words)
    # As `python SCRIPT` does it; with -m, as `python -m` does.
    sys.path[0] = os.getcwd() if as_module else str(Path(target).resolve().parent)
    with cpu_shims(), gradient_accumulation_fusion():
        _answer_for_cuda()
        _replace_in_megatron()
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
