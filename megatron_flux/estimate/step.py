"""A training step from its layers: time (pipeline stages, data parallelism, optimizer) and memory of the fullest GPU.

The formulae, their sources and what they take for granted are in slurm/PLAN.md.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_flux.bench.shapes import Case
from megatron_flux.estimate import layer
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.layer import Layer, Phase
from megatron_flux.estimate.measured import MeasuredLayers
from megatron_flux.estimate.rates import Rates
from megatron_flux.train.presets import step_flops

BYTES_PER_LOGIT = 44  # read and written: conversion, maximum, difference, exponential, sum, gradient, conversion back
OPTIMIZER_BYTES = 42
"""A parameter of the shard: Adam's four fp32 reads and three writes, the bf16 copy, the norm, clipping."""


class Stage(NamedTuple):
    """One micro-batch on one pipeline stage, milliseconds."""

    layers: Layer  # all of the stage's
    vocabulary: Layer  # embedding and output layer, where the stage has them
    host: float  # host time beyond the GPU's, where the host is the slower


def predict_stages(job: Job, rates: Rates, arm: str, layers: MeasuredLayers | None = None) -> list[Stage]:
    """All pipeline stages of the arm ``baseline`` or ``flux``, which must have been allowed to run.

    Measured ``layers`` are used where they are of this very layer without recomputation.
    """
    run, count = job.run, job.layers_per_stage
    one = layer.predict(rates, arm, job.layer, run.shape.seq_length, run.micro_batch_size, run.tp, run.recompute)
    if layers is not None and run.recompute == "none":
        one = _measured(one, layers, arm, job)
    late = count * max(0.0, rates.host_ms_per_layer - one.total)
    stages = []
    for index in range(run.pp):
        vocabulary = Layer()
        if index == 0:
            vocabulary += _embedding(job, rates)
        if index == run.pp - 1:
            vocabulary += _output(job, rates, arm)
        stages.append(Stage(Layer(one.forward * count, one.backward * count), vocabulary, late))
    return stages


def _measured(one: Layer, layers: MeasuredLayers, arm: str, job: Job) -> Layer:
    """The measured layer, shared out between forward and backward as predicted; ``one`` if it was not measured."""
    total, floor = layers.ms(arm, job), layers.ms("floor", job)
    if total is None:
        return one
    compute = min(floor, total) if floor is not None else total * (1 - one.both.exposed / one.total)
    parts = []
    for phase in (one.forward, one.backward):
        own = compute * phase.compute / one.both.compute
        parts.append(Phase(own, total * phase.total / one.total - own, phase.collectives))
    return Layer(*parts)


def _embedding(job: Job, rates: Rates) -> Layer:
    whole, tp = 2 * job.tokens * job.run.shape.hidden_size, job.run.tp
    moved = rates.collective(whole * (tp - 1) / tp, tp)
    forward = Phase(rates.streamed(3 * whole), moved, moved)
    return Layer(forward, Phase(rates.streamed(4 * whole), moved, moved))  # the gradient is added up in fp32


def _output(job: Job, rates: Rates, arm: str) -> Layer:
    m, h, tp = job.tokens, job.run.shape.hidden_size, job.run.tp
    columns = job.run.padded_vocab_size // tp
    small = Phase(rates.streamed(BYTES_PER_LOGIT * m * columns) / 2 + rates.streamed(2 * m / tp * h * 5) / 2)
    logits = rates.pair(Case("all_gather_gemm", "", "output", "forward", m, columns, h), tp)
    dgrad = rates.pair(Case("gemm_reduce_scatter", "", "output", "dgrad", m, h, columns), tp)
    backward = layer.column_backward(rates, arm, m, columns, h, tp, dgrad)
    return Layer(layer.pair_phase(rates, logits, arm) + small, backward + small)


def add_up(job: Job, rates: Rates, stages: list[Stage]) -> dict[str, float]:
    """Milliseconds of the step of these stages: ``total`` is ``pipeline`` + ``data`` (exposed) + ``optimizer``.

    Parts of ``pipeline``: ``bubble`` (the slowest stage waits), ``point_to_point`` (exposed sends), and of the slowest
    stage ``tp_exposed`` (tensor-parallel communication), ``vocabulary`` (embedding and output layer), ``host`` (beyond
    the GPU's time). ``tp_collectives``: what those take by themselves. ``mfu`` is a share of the peak.
    """
    run, chunks, hop = job.run, job.virtual_pipeline, 0.0
    if run.pp > 1:  # by the slowest link that any pair of neighbours has; a rank sends its own rows
        rows = 2 * job.tokens * run.shape.hidden_size / run.tp
        hop = rates.within_node(rows) if job.gpus <= job.gpus_per_node else rates.network(rows)
    # The GPU's forward; its backward, and what the host is late.
    forward = [layers.forward.total + vocabulary.forward.total for layers, vocabulary, _ in stages]
    backward = [layers.backward.total + vocabulary.backward.total + host for layers, vocabulary, host in stages]
    each = [sum(both) + (2 * hop if chunks == 1 else 0.0) for both in zip(forward, backward, strict=True)]
    slowest = max(range(run.pp), key=each.__getitem__)
    worst, ramp = stages[slowest], 2 * (run.pp - 1) * hop if chunks > 1 else 0.0
    bubble = (sum(each) - each[slowest]) / chunks
    pipeline = run.micro_batches * each[slowest] + bubble + ramp
    counts = [stage_parameters(job, index) for index in range(run.pp)]
    data = max(_data(job, rates, *one) for one in zip(counts, forward, backward, strict=True))
    shards = run.dp if run.distributed_optimizer else 1
    optimizer = max(rates.memory(OPTIMIZER_BYTES * (count / shards) + 4 * count) for count in counts)
    total = pipeline + data + optimizer
    flops = step_flops(run.shape, run.global_batch_size) / run.world_size
    micro, layers, vocabulary = run.micro_batches, worst.layers, worst.vocabulary
    return {
        "pipeline": pipeline,
        "bubble": bubble,
        "point_to_point": 2 * hop * micro if chunks == 1 else ramp,
        "tp_exposed": micro * (layers.both.exposed + vocabulary.both.exposed),
        "tp_collectives": micro * (layers.both.collectives + vocabulary.both.collectives),
        "vocabulary": micro * vocabulary.total,
        "host": micro * worst.host,
        "data": data,
        "optimizer": optimizer,
        "total": total,
        "mfu": flops / (total / 1e3) / rates.device.peak_flops,
        "tflops_per_gpu": flops / (total / 1e3) / 1e12,
    }


def _data(job: Job, rates: Rates, count: int, forward: float, backward: float) -> float:
    """Exposed milliseconds of data-parallel communication of a stage with ``count`` parameters a rank."""
    run = job.run
    if run.dp == 1:
        return 0.0

    def ring(nbytes: float) -> float:
        local = rates.within_node(nbytes)
        if job.gpus <= job.gpus_per_node or job.peers_in_node == run.dp:
            return local
        return max(local, rates.network(nbytes, job.peers_in_node))

    moved = (run.dp - 1) / run.dp * count
    gradients = ring(4 * moved * (1 if run.distributed_optimizer else 2))  # reduce-scatter, or all-reduce
    parameters = ring(2 * moved) if run.distributed_optimizer else 0.0
    bucket = min(1.0, max(40e6, 1e6 * run.dp) / count)
    if run.overlap_grad_reduce:
        gradients = max(bucket * gradients, gradients - backward)
    if job.overlap_param_gather:
        parameters = max(bucket * parameters, parameters - forward)
    return gradients + parameters


def predict_memory(job: Job, arm: str) -> dict[str, float]:
    """GB (1e9 bytes) on a GPU of the stage that needs most: six parts and their ``total``."""
    return max((_stage_memory(job, arm, index) for index in range(job.run.pp)), key=lambda memory: memory["total"])


def _stage_memory(job: Job, arm: str, index: int) -> dict[str, float]:
    run, model, tokens, chunks = job.run, job.layer, job.tokens, job.virtual_pipeline
    count, hidden, tp = stage_parameters(job, index), run.shape.hidden_size, run.tp
    held = run.pp - index  # micro-batches
    if chunks > 1:
        held = (2 * (run.pp - index - 1) + (chunks - 1) * run.pp + 1) / chunks
    held = min(held, run.micro_batches)
    activations = held * job.layers_per_stage * layer.activations(model, tokens, tp, run.recompute, run.dropout > 0)
    if index == 0 and run.dropout > 0:
        activations += held * tokens * hidden / tp
    if index == run.pp - 1:
        activations += tokens * (4 * hidden + 8 * run.padded_vocab_size) / tp
    working = layer.working_memory(model, tokens, tp)
    if run.recompute == "full":
        working += layer.activations(model, tokens, tp, dropout=run.dropout > 0)
    found = {
        "parameters": 2 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count / (run.dp if run.distributed_optimizer else 1),
        "activations": activations,
        "working": working,
        "flux_workspace": layer.flux_workspace(tokens, hidden) if arm == "flux" and tp > 1 else 0.0,
    }
    gb = {name: nbytes / 1e9 for name, nbytes in found.items()}
    return gb | {"total": sum(gb.values())}


def stage_parameters(job: Job, index: int) -> int:
    """Parameters of one rank of stage ``index``."""
    shape, tp, pp = job.run.shape, job.run.tp, job.run.pp
    h, norms = shape.hidden_size, 2 if shape.normalization == "LayerNorm" else 1
    count = job.layers_per_stage * layer.parameters(job.layer, tp, bias=shape.bias, norms=norms)
    table = job.run.padded_vocab_size * h // tp
    if index == 0:
        count += table + (shape.seq_length * h if shape.position_embedding == "learned_absolute" else 0)
    if index == pp - 1:
        count += table + norms * h
    return count
