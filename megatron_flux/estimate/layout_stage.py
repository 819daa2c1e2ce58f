"""One layer of a pipeline stage, built by megatron-core and run patched over meta tensors (shapes without data).

Whatever does not divide (heads, hidden, MLP, vocabulary, sequence) fails here as it would in the job, and fallbacks are
errors. Attention's core is left out: it has no linear layer. Needs a parallel state, real or over torch's fake group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_flux.errors import FluxError
from megatron_flux.estimate.memory import stage_parameters
from megatron_flux.estimate.options import Job


@dataclass(frozen=True, kw_only=True)
class StageCheck:
    """What was found on one rank of a stage."""

    stage: int
    layers: int
    """Layers of the stage in the job."""
    parameters: int
    """Of one rank, with all of the stage's layers."""
    output: tuple[int, ...]
    """Shape of what the stage hands on: rows of the rank, or its columns of the logits."""
    flux_layers: int
    """Linears that ran flux's operators."""
    calls: dict[str, int]
    """Their calls in one forward and backward."""


class _NoAttention(torch.nn.Module):
    """Hands the queries on: ``[s, b, heads, head size]`` to ``[s, b, heads * head size]``."""

    def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Key, value, mask and the rest are not looked at."""
        return query.flatten(2)


def check_stage(rank: int, job: Job, stage: int) -> StageCheck:
    """Build and run one layer of ``stage`` as the rank that the parallel state says.

    Raises:
        FluxError: megatron-core cannot build it, flux cannot run it, or it has other parameters than the plan counts;
            names rank and stage.
    """
    import megatron_flux
    from megatron_flux.config import FluxConfig
    from megatron_flux.train.shims import cpu_shims

    where = f"rank {rank}, pipeline stage {stage}"
    before = megatron_flux.report()["calls"]
    try:
        # backend: meta tensors have no GPU for the fused kernels; shapes and calls are the same.
        with cpu_shims(), megatron_flux.patched(FluxConfig(backend="reference", strict=job.run.tp > 1)):
            parameters, output, report = _run(job, stage)
    except (AssertionError, RuntimeError, ValueError, FluxError) as error:
        raise FluxError(f"{where}: {type(error).__name__}: {error}") from error
    expected = stage_parameters(_of_layers(job, job.run.pp), stage)
    if parameters != expected:
        raise FluxError(f"{where}: megatron-core builds {parameters} parameters, the plan counts {expected}")
    calls = {name: count - before.get(name, 0) for name, count in report["calls"].items()}
    return StageCheck(
        stage=stage,
        layers=job.layers_per_stage,
        parameters=stage_parameters(job, stage),
        output=output,
        flux_layers=report["active_layers"],
        calls={name: count for name, count in calls.items() if count},
    )


def _of_layers(job: Job, layers: int) -> Job:
    """The same job with another number of layers."""
    shape = job.run.shape.model_copy(update={"num_layers": layers})
    return Job(**{**vars(job), "run": job.run.model_copy(update={"shape": shape})})


def _run(job: Job, stage: int) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """One layer of the stage: parameters, and after a forward and a backward its output's shape and flux's report."""
    import megatron_flux
    from megatron_flux.train import model as building
    from megatron_flux.train.trainer import seed_everything

    changes = {"device": "cpu", "gradient_accumulation_fusion": False}
    run = _of_layers(job, job.run.pp).run.model_copy(update=changes)
    seed_everything(run.seed)
    config = building.transformer_config(run)
    config.perform_initialization = False  # memory that nobody touches is never taken
    model = building.build_model(run, config).to("meta")
    inner = building.unwrap(model)
    for layer in inner.decoder.layers:
        layer.self_attention.core_attention = _NoAttention()
    seq, batch, h = run.shape.seq_length, run.micro_batch_size, run.shape.hidden_size
    rows = seq // run.tp if config.sequence_parallel else seq
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    mask = torch.empty(1, 1, seq, seq, dtype=torch.bool, device="meta")
    if stage > 0:
        inner.set_input_tensor(torch.empty(rows, batch, h, dtype=run.dtype, device="meta", requires_grad=True))
    with _on_meta():
        output = model(tokens, tokens, mask)
        output.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise FluxError(f"{name} got no gradient")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters, tuple(output.shape), megatron_flux.report()  # layers count as long as they live


@contextmanager
def _on_meta() -> Iterator[None]:
    """Megatron's own buffers, which it allocates on the current device, are meta tensors too."""
    stock = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = stock
