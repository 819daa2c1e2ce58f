"""A micro-batch on every pipeline stage: its layers, and the vocabulary's two layers on the first and the last.

Embedding (first stage): rows are looked up on every rank and reduce-scattered, which nobody hides; backward gathers.
Output layer (last stage): a column-parallel linear of padded vocabulary / tp columns, final norm, and the cross entropy
over fp32 logits: 44 bytes a logit are read and written (conversion, maximum, difference, exponential, sum, gradient,
conversion back). Its three all-reduces of one number per token are left out. No row-parallel layer comes behind it that
could gather its x ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.bench.shapes import Case, Model
from megatron_flux.estimate.layer import NOTHING, Layer, Phase, column_backward, pair_phase, predict_layer
from megatron_flux.estimate.measured import MeasuredLayers
from megatron_flux.estimate.options import Job
from megatron_flux.estimate.rates import Rates
from megatron_flux.train.presets import ModelShape

BYTES_PER_LOGIT = 44


@dataclass(frozen=True)
class Stage:
    """One micro-batch on one pipeline stage, milliseconds."""

    layers: Layer
    """All of the stage's layers."""
    vocabulary: Layer
    """Embedding and output layer, where the stage has them."""
    host: float
    """Host time beyond the GPU's, where the host is the slower."""

    @property
    def forward(self) -> float:
        """The GPU's forward."""
        return self.layers.forward.total + self.vocabulary.forward.total

    @property
    def backward(self) -> float:
        """The GPU's backward, and what the host is late."""
        return self.layers.backward.total + self.vocabulary.backward.total + self.host

    @property
    def total(self) -> float:
        """Both directions."""
        return self.forward + self.backward

    @property
    def exposed(self) -> float:
        """Exposed tensor-parallel communication."""
        parts = (self.layers, self.vocabulary)
        return sum(part.forward.exposed + part.backward.exposed for part in parts)

    @property
    def collectives(self) -> float:
        """What the tensor-parallel collectives take by themselves."""
        parts = (self.layers, self.vocabulary)
        return sum(part.forward.collectives + part.backward.collectives for part in parts)


def layer_model(shape: ModelShape) -> Model:
    """The shape of one layer as the benchmarks say it."""
    return Model(
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        ffn=shape.ffn_hidden_size,
        gated=shape.activation == "swiglu",
    )


def predict_stages(
    job: Job, rates: Rates, arm: str, layers: MeasuredLayers | None = None, host_ms_per_layer: float = 0.0
) -> list[Stage]:
    """All pipeline stages of one arm; the arm ``flux`` must have been allowed to run.

    Args:
        job: the job.
        rates: times of its parts.
        arm: ``baseline`` or ``flux``.
        layers: measured layers, used where they are of this very layer without recomputation.
        host_ms_per_layer: host time to enqueue a layer's forward and backward.
    """
    run, model = job.run, layer_model(job.run.shape)
    one = predict_layer(rates, arm, model, run.shape.seq_length, run.micro_batch_size, run.tp, run.recompute)
    if layers is not None and run.recompute == "none":
        one = _measured(one, layers, arm, model, job) or one
    count = job.layers_per_stage
    stages = []
    for index in range(run.pp):
        vocabulary = Layer(NOTHING, NOTHING)
        if index == 0:
            vocabulary = _plus(vocabulary, _embedding(job, rates))
        if index == run.pp - 1:
            vocabulary = _plus(vocabulary, _output(job, rates, arm))
        late = count * max(0.0, host_ms_per_layer - one.total)
        stages.append(Stage(Layer(one.forward.times(count), one.backward.times(count)), vocabulary, late))
    return stages


def _measured(one: Layer, layers: MeasuredLayers, arm: str, model: Model, job: Job) -> Layer | None:
    """The measured layer, shared out between forward and backward as predicted; None if it was not measured."""
    sizes = (model, job.run.shape.seq_length, job.run.micro_batch_size, job.run.tp)
    total, floor = layers.ms(arm, *sizes), layers.ms("floor", *sizes)
    if total is None:
        return None
    exposed = one.forward.exposed + one.backward.exposed
    compute = min(floor, total) if floor is not None else total * (1 - exposed / one.total)
    parts = []
    for phase in (one.forward, one.backward):
        own = compute * phase.compute / (one.forward.compute + one.backward.compute)
        parts.append(Phase(own, total * phase.total / one.total - own, phase.collectives))
    return Layer(*parts)


def _plus(a: Layer, b: Layer) -> Layer:
    return Layer(a.forward + b.forward, a.backward + b.backward)


def _embedding(job: Job, rates: Rates) -> Layer:
    hidden, tp = job.run.shape.hidden_size, job.run.tp
    whole = 2 * job.tokens * hidden
    moved = rates.collective(whole * (tp - 1) / tp, tp)
    forward = Phase(rates.streamed(3 * whole), moved, moved)
    return Layer(forward, Phase(rates.streamed(4 * whole), moved, moved))  # the gradient is added up in fp32


def _output(job: Job, rates: Rates, arm: str) -> Layer:
    m, h, tp = job.tokens, job.run.shape.hidden_size, job.run.tp
    columns = job.run.padded_vocab_size // tp
    norm = rates.streamed(2 * m / tp * h * 5)
    loss = rates.streamed(BYTES_PER_LOGIT * m * columns)
    ahead = rates.pair(Case("all_gather_gemm", "", "output", "forward", m, columns, h), tp)
    dgrad = rates.pair(Case("gemm_reduce_scatter", "", "output", "dgrad", m, h, columns), tp)
    forward = pair_phase(rates, ahead, arm) + Phase(loss / 2 + norm / 2, 0.0, 0.0)
    return Layer(forward, column_backward(rates, arm, m, columns, h, tp, dgrad) + Phase(loss / 2 + norm / 2, 0.0, 0.0))
