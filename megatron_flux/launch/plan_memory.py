"""Memory of the GPU of each pipeline stage that needs most, in GB (1e9 bytes).

* Parameters, gradients, optimizer with bf16 parameters and fp32 gradients: 6 + 12/dp bytes a parameter with the
  distributed optimizer, 18 without (Megatron Core, distributed optimizer).
* Activations of a layer with tensor and sequence parallelism and FlashAttention, which keeps no s x s matrix:
  34 s b h/tp bytes for GPT's layers with dropout (arXiv 2205.05198, equation 4 without its 5 a s/h; added up here by
  the tensors of section 4.1, so that GQA, gated MLPs and no dropout count as they are). Full recomputation keeps the
  layer's input, 2 s b h/tp; selective keeps the same as none, since there is no s x s matrix to drop.
* Stage i of pp holds min(pp - i, micro-batches) micro-batches (1F1B, arXiv 2104.04473, section 2.2); interleaved, the
  first holds pp (1 + (pp - 1)/(pp v)) (arXiv 2205.05198, section 4.2.3).
* Last stage: logits in bf16 and fp32 and their gradient, inputs of norm and output layer (section 4.3).
* Working memory: whole-sequence temporaries, of which the gathered input is one.
* Flux: two double-buffered slabs as :mod:`megatron_flux.comm.slab` makes them: inputs gathered for GEMMs (or partials)
  and inputs gathered for wgrad. About 4 x tokens x hidden x 2 bytes, whatever the number of layers.

Not in it: CUDA's context, NCCL's buffers and fragmentation; leave some GB for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.comm.slab import FLAG_WORDS, size_class
from megatron_flux.launch.plan_options import Job
from megatron_flux.launch.plan_stage import layer_model


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


def predict_memory(job: Job, arm: str) -> Memory:
    """The stage that needs most."""
    return max((_stage(job, arm, index) for index in range(job.run.pp)), key=lambda memory: memory.total)


def _stage(job: Job, arm: str, index: int) -> Memory:
    run = job.run
    count = stage_parameters(job, index)
    held = _held(job, index)
    per_layer = layer_activations(job)
    activations = held * job.layers_per_stage * per_layer
    tokens, hidden, tp = job.tokens, run.shape.hidden_size, run.tp
    if index == 0 and run.dropout > 0:
        activations += held * tokens * hidden / tp
    if index == run.pp - 1:
        activations += tokens * (4 * hidden + 8 * run.padded_vocab_size) / tp
    working = 8 * tokens * max(hidden, 2 * run.shape.ffn_hidden_size // tp)
    if run.recompute == "full":
        working += layer_activations(job, recompute="none")
    return Memory(
        parameters=2 * count / 1e9,
        gradients=4 * count / 1e9,
        optimizer=12 * count / (run.dp if run.distributed_optimizer else 1) / 1e9,
        activations=activations / 1e9,
        working=working / 1e9,
        flux_workspace=flux_workspace(job) / 1e9 if arm == "flux" and tp > 1 else 0.0,
    )


def _held(job: Job, index: int) -> float:
    pp, chunks, micro = job.run.pp, job.virtual_pipeline, job.run.micro_batches
    if chunks == 1:
        return min(pp - index, micro)
    return min(pp * (1 + (pp - 1) / (pp * chunks)), micro)


def layer_activations(job: Job, recompute: str | None = None) -> float:
    """Bytes that a layer keeps of a micro-batch on one rank."""
    shape, tp, h = job.run.shape, job.run.tp, job.run.shape.hidden_size
    if (recompute or job.run.recompute) == "full":
        return 2 * job.tokens * h / tp
    model = layer_model(shape)
    wide = (model.heads + 2 * model.groups) * model.head_dim
    attention = 2 * h + 2 * wide + 2 * model.heads * model.head_dim
    mlp = 2 * h + 2 * model.ffn * (3 if model.gated else 2)
    masks = 2 * h if job.run.dropout > 0 else 0
    return job.tokens * (4 * h + attention + mlp + masks) / tp


def stage_parameters(job: Job, index: int) -> int:
    """Parameters of one rank of stage ``index``: linears and biases split over tp, norms on every rank."""
    shape, tp, pp = job.run.shape, job.run.tp, job.run.pp
    model, h, norms = layer_model(shape), shape.hidden_size, 2 if shape.normalization == "LayerNorm" else 1
    wide, fc1 = (model.heads + 2 * model.groups) * model.head_dim, model.ffn * (2 if model.gated else 1)
    layer = h * (wide + model.heads * model.head_dim + fc1 + model.ffn) // tp + 2 * norms * h
    if shape.bias:
        layer += (wide + fc1) // tp + 2 * h  # biases of row-parallel linears are whole on every rank
    count = job.layers_per_stage * layer
    table = job.run.padded_vocab_size * h // tp
    if index == 0:
        count += table + (shape.seq_length * h if shape.position_embedding == "learned_absolute" else 0)
    if index == pp - 1:
        count += table + norms * h
    return count


def flux_workspace(job: Job) -> int:
    """Bytes of symmetric memory of flux's slabs: each has two halves of the largest call, and flags."""
    half = size_class(2 * job.tokens * job.run.shape.hidden_size)
    return 2 * 2 * (half + 4 * FLAG_WORDS)
