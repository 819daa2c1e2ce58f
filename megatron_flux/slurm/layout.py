"""Check a job's layout without a GPU: build one layer of each pipeline stage as one of its ranks, and run it.

Over torch's ``fake`` process group, which communicates nothing, megatron-core initialises its parallel state as the
first rank of each stage. One layer runs there, patched, over meta tensors (shapes without data). Whatever does not
divide fails as it would in the job, and fallbacks are errors. Attention's core is left out: it has no linear layer.

Hazard: parallel state is one per process, so nothing else in the process may use it meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_flux import FluxConfig, patched, report
from megatron_flux.errors import FluxError
from megatron_flux.slurm.job import Resolved, least_memory
from megatron_flux.train.config import RunConfig
from megatron_flux.train.shims import cpu_shims


def check(job: Resolved) -> list[str]:
    """Run one layer of each stage of ``job``, and describe the layout in lines. Raises FluxError: a stage fails."""
    run = job.run
    return [
        f"{run.world_size} ranks on {job.job.nodes} node(s): tp {run.tp} x pp {run.pp} x dp {run.dp}",
        f"link of tensor-parallel groups: {job.link}",
        *(_check_stage(run, stage) for stage in range(run.pp)),
        f"{least_memory(run):.1f} GiB a GPU for weights, gradients and optimizer state, without activations",
        *filter(None, [run.bytes_note(job.link)]),
        "every stage fits",
    ]


@contextmanager
def _world(rank: int, run: RunConfig) -> Iterator[None]:
    """Initialise torch.distributed and megatron-core's parallel state as ``rank``."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts the rank before every line of a later error
    dist.init_process_group("fake", rank=rank, world_size=run.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(run.tp, run.pp, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = hook


def _check_stage(run: RunConfig, stage: int) -> str:
    """Build and run one layer of ``stage`` as its first rank, and describe it; a FluxError names both."""
    rank = stage * run.tp * run.dp  # Megatron's order: tp, then dp, then pp
    one_layer = run.model_copy(update={"shape": run.shape.model_copy(update={"num_layers": run.pp})})
    try:
        # backend: meta tensors have no GPU for the fused kernels; shapes and calls are the same.
        with _world(rank, run), cpu_shims(), patched(FluxConfig(backend="reference", strict=run.tp > 1)):
            model, output = _run(one_layer, stage)
            flux_layers = report()["active_layers"]  # layers count as long as they live
            del model
    except (AssertionError, RuntimeError, ValueError, FluxError) as error:
        raise FluxError(f"rank {rank}, pipeline stage {stage}: {type(error).__name__}: {error}") from error
    layers, shape = run.shape.num_layers // run.pp, " x ".join(map(str, output.shape))
    return f"stage {stage}: {layers} layers, output {shape}, {flux_layers} linears of one layer run flux"


def _run(run: RunConfig, stage: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """Build the stage's model on meta tensors; return it and its output after a forward and a backward."""
    from megatron_flux.train import model as building
    from megatron_flux.train.trainer import seed_everything

    plain = {"device": "cpu", "transformer_impl": "local", "fp8": None, "cuda_graph_impl": "none"}
    run = run.model_copy(update=plain | {"gradient_accumulation_fusion": False})
    seed_everything(run.seed)
    config = building.transformer_config(run)
    config.perform_initialization = False  # pages that are never written take no memory
    model: Any = building.build_model(run, config).to("meta")
    inner = getattr(model, "module", model)  # in a Float16Module where it is bf16
    for layer in inner.decoder.layers:
        layer.self_attention.core_attention = _NoAttention()
    seq, batch, h = run.shape.seq_length, run.micro_batch_size, run.shape.hidden_size
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    mask = torch.empty(1, 1, seq, seq, dtype=torch.bool, device="meta")
    if stage > 0:
        rows = seq // run.tp if config.sequence_parallel else seq
        inner.set_input_tensor(torch.empty(rows, batch, h, dtype=run.dtype, device="meta", requires_grad=True))
    # Megatron's own buffers, which it allocates on the current device, are meta tensors too.
    with mock.patch.multiple(torch.cuda, current_device=lambda: torch.device("meta")):
        output = model(tokens, tokens, mask)
        output.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise FluxError(f"{name} got no gradient")
    return model, output


class _NoAttention(torch.nn.Module):
    """Pass the queries on: ``[s, b, heads, head size]`` to ``[s, b, heads * head size]``."""

    def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return query.flatten(2)
