"""A training step from its layers: pipeline stages, data parallelism, optimizer.

* Embedding (first stage): rows are looked up on every rank and reduce-scattered, which nothing hides; backward gathers.
* Output layer (last stage): a column-parallel linear of padded vocabulary / tp columns, final norm, and the cross
  entropy over fp32 logits: 44 bytes a logit are read and written (conversion, maximum, difference, exponential, sum,
  gradient, conversion back). Its three all-reduces of one number per token are left out. Its x is not prefetched.
* Pipeline, 1F1B: (m - 1) x slowest stage + sum over stages; of equal stages that is (m + pp - 1) x stage (arXiv
  2104.04473, section 2.2.1). Interleaved with v chunks, what is no steady state is divided by v (section 2.2.2).
* Point to point: 2 s b h/tp bytes each way (sequence parallelism sends a rank's rows). 1F1B waits for it twice in every
  micro-batch; interleaved it is overlapped but while the pipeline fills and drains.
* Gradients: fp32, reduce-scatter with the distributed optimizer, which also gathers bf16 parameters, all-reduce
  without. A ring moves (dp - 1)/dp of the bytes, twice for an all-reduce. Overlapped, the reduction hides behind the
  last micro-batch's backward and the gather behind the first one's forward, but for one bucket (Megatron Core: at
  least 40 million parameters).
* Bandwidth of data parallelism: the link if the group is in one node; else the network's, as often as members share a
  node and with it adapters. Latencies of rings over the network are left out.
* Optimizer, memory-bound: 42 bytes a parameter of its shard (Adam's four fp32 reads and three writes, the bf16 copy,
  the norm, clipping), and 4 a parameter to clear gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_flux.bench.shapes import Case
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.layer import Layer, Phase, column_backward, pair_phase, predict_layer
from megatron_flux.estimate.measured import MeasuredLayers
from megatron_flux.estimate.memory import stage_parameters
from megatron_flux.estimate.rates import Rates
from megatron_flux.train.presets import step_flops

BYTES_PER_LOGIT = 44
OPTIMIZER_BYTES = 42


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


@dataclass(frozen=True, kw_only=True)
class Step:
    """Milliseconds of a step, and what it adds up from. ``pipeline`` + ``data`` + ``optimizer`` is ``total``."""

    pipeline: float
    bubble: float
    """Part of ``pipeline``: time the slowest stage waits."""
    point_to_point: float
    """Part of ``pipeline``: exposed sends between stages."""
    tp_exposed: float
    """Part of ``pipeline``: exposed tensor-parallel communication of the slowest stage."""
    tp_collectives: float
    """What those collectives take by themselves."""
    vocabulary: float
    """Part of ``pipeline``: embedding and output layer of the slowest stage."""
    host: float
    """Part of ``pipeline``: host time beyond the GPU's."""
    data: float
    """Exposed data-parallel communication."""
    optimizer: float
    total: float
    mfu: float
    tflops_per_gpu: float


def predict_step(job: Job, rates: Rates, arm: str, layers: MeasuredLayers | None = None) -> Step:
    """Predict a step of one arm.

    Args:
        job: the job.
        rates: times of its parts.
        arm: ``baseline`` or ``flux``, which must have been allowed to run.
        layers: measured layers, used where they are of this very layer without recomputation.
    """
    return add_up(job, rates, predict_stages(job, rates, arm, layers))


def predict_stages(job: Job, rates: Rates, arm: str, layers: MeasuredLayers | None = None) -> list[Stage]:
    """All pipeline stages; arguments as in :func:`predict_step`."""
    run, count = job.run, job.layers_per_stage
    one = predict_layer(rates, arm, job.layer, run.shape.seq_length, run.micro_batch_size, run.tp, run.recompute)
    if layers is not None and run.recompute == "none":
        one = _measured(one, layers, arm, job) or one
    late = count * max(0.0, rates.host_ms_per_layer - one.total)
    stages = []
    for index in range(run.pp):
        vocabulary = Layer()
        if index == 0:
            vocabulary += _embedding(job, rates)
        if index == run.pp - 1:
            vocabulary += _output(job, rates, arm)
        stages.append(Stage(one.times(count), vocabulary, late))
    return stages


def _measured(one: Layer, layers: MeasuredLayers, arm: str, job: Job) -> Layer | None:
    """The measured layer, shared out between forward and backward as predicted; None if it was not measured."""
    sizes = (job.layer, job.run.shape.seq_length, job.run.micro_batch_size, job.run.tp)
    total, floor = layers.ms(arm, *sizes), layers.ms("floor", *sizes)
    if total is None:
        return None
    compute = min(floor, total) if floor is not None else total * (1 - one.exposed / one.total)
    parts = []
    for phase in (one.forward, one.backward):
        own = compute * phase.compute / (one.forward.compute + one.backward.compute)
        parts.append(Phase(own, total * phase.total / one.total - own, phase.collectives))
    return Layer(*parts)


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
    logits = rates.pair(Case("all_gather_gemm", "", "output", "forward", m, columns, h), tp)
    dgrad = rates.pair(Case("gemm_reduce_scatter", "", "output", "dgrad", m, h, columns), tp)
    forward = pair_phase(rates, logits, arm) + Phase(loss / 2 + norm / 2)
    return Layer(forward, column_backward(rates, arm, m, columns, h, tp, dgrad) + Phase(loss / 2 + norm / 2))


def add_up(job: Job, rates: Rates, stages: list[Stage]) -> Step:
    """The step of these stages."""
    run, chunks = job.run, job.virtual_pipeline
    hop = _hop(job, rates)
    each = [stage.total + (2 * hop if chunks == 1 else 0.0) for stage in stages]
    slowest = max(range(run.pp), key=each.__getitem__)
    worst, steady = stages[slowest], run.micro_batches * each[slowest]
    ramp = 2 * (run.pp - 1) * hop if chunks > 1 else 0.0
    bubble = (sum(each) - each[slowest]) / chunks
    pipeline = steady + bubble + ramp
    data = max(_data(job, rates, index, stage) for index, stage in enumerate(stages))
    optimizer = max(_optimizer(job, rates, index) for index in range(run.pp))
    total = pipeline + data + optimizer
    flops = step_flops(run.shape, run.global_batch_size) / run.world_size
    waits = 2 * hop * run.micro_batches if chunks == 1 else ramp
    return Step(
        pipeline=pipeline,
        bubble=bubble,
        point_to_point=waits,
        tp_exposed=run.micro_batches * (worst.layers.exposed + worst.vocabulary.exposed),
        tp_collectives=run.micro_batches * (worst.layers.collectives + worst.vocabulary.collectives),
        vocabulary=run.micro_batches * worst.vocabulary.total,
        host=run.micro_batches * worst.host,
        data=data,
        optimizer=optimizer,
        total=total,
        mfu=flops / (total / 1e3) / rates.device.peak_flops,
        tflops_per_gpu=flops / (total / 1e3) / 1e12,
    )


def _hop(job: Job, rates: Rates) -> float:
    """Milliseconds of one send between neighbouring stages, by the slowest link that any pair has."""
    if job.run.pp == 1:
        return 0.0
    nbytes = 2 * job.tokens * job.run.shape.hidden_size / job.run.tp
    return rates.within_node(nbytes) if job.gpus <= job.gpus_per_node else rates.network(nbytes)


def _data(job: Job, rates: Rates, index: int, stage: Stage) -> float:
    """Exposed milliseconds of a stage's data-parallel communication."""
    run, count = job.run, stage_parameters(job, index)
    if run.dp == 1:
        return 0.0
    moved = (run.dp - 1) / run.dp * count
    gradients = _ring(job, rates, 4 * moved * (1 if run.distributed_optimizer else 2))
    parameters = _ring(job, rates, 2 * moved) if run.distributed_optimizer else 0.0
    bucket = min(1.0, max(40e6, 1e6 * run.dp) / count)
    if run.overlap_grad_reduce:
        gradients = max(bucket * gradients, gradients - stage.backward)
    if job.overlap_param_gather:
        parameters = max(bucket * parameters, parameters - stage.forward)
    return gradients + parameters


def _ring(job: Job, rates: Rates, nbytes: float) -> float:
    local = rates.within_node(nbytes)
    if job.gpus <= job.gpus_per_node or job.peers_in_node == job.run.dp:
        return local
    return max(local, rates.network(nbytes, job.peers_in_node))


def _optimizer(job: Job, rates: Rates, index: int) -> float:
    count = stage_parameters(job, index)
    shard = count / (job.run.dp if job.run.distributed_optimizer else 1)
    return rates.memory(OPTIMIZER_BYTES * shard + 4 * count)
