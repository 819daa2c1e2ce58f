"""Memory of the GPU of each pipeline stage that needs most, in GB (1e9 bytes).

* Parameters, gradients, optimizer with bf16 parameters and fp32 gradients: 6 + 12/dp bytes a parameter with the
  distributed optimizer, 18 without (Megatron Core, distributed optimizer).
* Activations of a layer with tensor and sequence parallelism and FlashAttention, which keeps no s x s matrix:
  34 s b h/tp bytes for GPT's layers with dropout (arXiv 2205.05198, equation 4 without its 5 a s/h; added up here by
  the tensors of section 4.1, so that GQA, gated MLPs and no dropout count as they are). Full recomputation keeps the
  layer's input, 2 s b h/tp; selective keeps the same as none, since there is no s x s matrix to drop.
* Stage i of pp holds min(pp - i, micro-batches) micro-batches (1F1B, arXiv 2104.04473, section 2.2); interleaved,
  (2 (pp - i - 1) + (v - 1) pp + 1)/v, which on the first is pp (1 + (pp - 1)/(pp v)) (arXiv 2205.05198, section
  4.2.3).
* Last stage: logits in bf16 and fp32 and their gradient, inputs of norm and output layer (section 4.3).
* Working memory: whole-sequence temporaries, of which the gathered input is one.
* Flux: two double-buffered slabs as :mod:`megatron_flux.comm.slab` makes them: inputs gathered for GEMMs (or partials)
  and inputs gathered for wgrad. About 4 x tokens x hidden x 2 bytes, whatever the number of layers.

Not in it: CUDA's context, NCCL's buffers and fragmentation; leave some GB for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.bench.shapes import Model
from megatron_flux.comm.slab import FLAG_WORDS, size_class
from megatron_flux.estimate.job import Job


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One GPU, GB."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    flux_workspace: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(vars(self).values())

    @property
    def state(self) -> float:
        """What stays between steps, and a compare job holds once for each arm."""
        return self.parameters + self.gradients + self.optimizer


def predict_memory(job: Job, arm: str) -> Memory:
    """The stage that needs most."""
    return max((_stage(job, arm, index) for index in range(job.run.pp)), key=lambda memory: memory.total)


def _stage(job: Job, arm: str, index: int) -> Memory:
    run, model, tokens = job.run, job.layer, job.tokens
    count, hidden, tp = stage_parameters(job, index), run.shape.hidden_size, run.tp
    held = _micro_batches_held(job, index)
    activations = held * job.layers_per_stage * layer_activations(model, tokens, tp, run.recompute, run.dropout > 0)
    if index == 0 and run.dropout > 0:
        activations += held * tokens * hidden / tp
    if index == run.pp - 1:
        activations += tokens * (4 * hidden + 8 * run.padded_vocab_size) / tp
    working = working_memory(model, tokens, tp)
    if run.recompute == "full":
        working += layer_activations(model, tokens, tp, dropout=run.dropout > 0)
    return Memory(
        parameters=2 * count / 1e9,
        gradients=4 * count / 1e9,
        optimizer=12 * count / (run.dp if run.distributed_optimizer else 1) / 1e9,
        activations=activations / 1e9,
        working=working / 1e9,
        flux_workspace=flux_workspace(tokens, hidden) / 1e9 if arm == "flux" and tp > 1 else 0.0,
    )


def _micro_batches_held(job: Job, index: int) -> float:
    pp, chunks, micro = job.run.pp, job.virtual_pipeline, job.run.micro_batches
    if chunks == 1:
        return min(pp - index, micro)
    return min((2 * (pp - index - 1) + (chunks - 1) * pp + 1) / chunks, micro)


def layer_activations(model: Model, tokens: int, tp: int, recompute: str = "none", dropout: bool = False) -> float:
    """Bytes that a layer keeps of a micro-batch of ``tokens`` on one rank."""
    h = model.hidden
    if recompute == "full":
        return 2 * tokens * h / tp
    wide = (model.heads + 2 * model.groups) * model.head_dim
    attention = 2 * h + 2 * wide + 2 * model.heads * model.head_dim
    mlp = 2 * h + 2 * model.ffn * (3 if model.gated else 2)
    return tokens * (4 * h + attention + mlp + (2 * h if dropout else 0)) / tp


def layer_parameters(model: Model, tp: int, *, bias: bool, norms: int) -> int:
    """Parameters of a layer on one rank: linears split over tp, each norm with ``norms`` vectors on every rank."""
    h, fc1 = model.hidden, model.ffn * (2 if model.gated else 1)
    wide = (model.heads + 2 * model.groups) * model.head_dim
    count = h * (wide + model.heads * model.head_dim + fc1 + model.ffn) // tp + 2 * norms * h
    # Biases of row-parallel linears are whole on every rank.
    return count + ((wide + fc1) // tp + 2 * h if bias else 0)


def working_memory(model: Model, tokens: int, tp: int) -> float:
    """Bytes of whole-sequence temporaries: two tensors, one of them with its gradient in the making."""
    return 8 * tokens * max(model.hidden, 2 * model.ffn // tp)


def stage_parameters(job: Job, index: int) -> int:
    """Parameters of one rank of stage ``index``."""
    shape, tp, pp = job.run.shape, job.run.tp, job.run.pp
    h, norms = shape.hidden_size, 2 if shape.normalization == "LayerNorm" else 1
    count = job.layers_per_stage * layer_parameters(job.layer, tp, bias=shape.bias, norms=norms)
    table = job.run.padded_vocab_size * h // tp
    if index == 0:
        count += table + (shape.seq_length * h if shape.position_embedding == "learned_absolute" else 0)
    if index == pp - 1:
        count += table + norms * h
    return count


def flux_workspace(tokens: int, hidden: int) -> int:
    """Bytes of symmetric memory of flux's slabs: each has two halves of the largest call, and flags."""
    return 2 * 2 * (size_class(2 * tokens * hidden) + 4 * FLAG_WORDS)
