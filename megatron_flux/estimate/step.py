"""Time and memory of a layer, of the stages of a pipeline and of a training step.

The formulae, their sources and what they take for granted are in slurm/PLAN.md. In stock Megatron (megatron-core's
``linear_with_grad_accumulation_and_async_allreduce``) each collective and its GEMM run in turn (``serial``), but in
backward of QKV and FC1, where dgrad runs beside the all-gather of x and wgrad beside the reduce-scatter of dx
(``overlapped``). In flux every pair of collective and GEMM is one ``fused`` call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_flux.bench import shapes
from megatron_flux.bench.shapes import Case, layer_cases, working_memory
from megatron_flux.comm.slab import FLAG_WORDS, size_class
from megatron_flux.estimate.fp8 import quantised_numbers
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.rates import MeasuredLayers, Pair, Rates
from megatron_flux.estimate.slow_links import SLOW, SPARED
from megatron_flux.train.presets import ModelShape, step_flops

BYTES_PER_LOGIT = 44  # read and written: conversion, maximum, difference, exponential, sum, gradient, conversion back
OPTIMIZER_BYTES = 42
"""A parameter of the shard: Adam's four fp32 reads and three writes, the bf16 copy, the norm, clipping."""


@dataclass(frozen=True)
class Phase:
    """One direction. ``exposed`` is what it takes beyond the same work without communication, ``compute``."""

    compute: float = 0.0
    exposed: float = 0.0
    collectives: float = 0.0  # what the collectives take by themselves

    @property
    def total(self) -> float:
        """Milliseconds from start to end."""
        return self.compute + self.exposed

    def __add__(self, other: Phase) -> Phase:
        """One after the other."""
        return Phase(self.compute + other.compute, self.exposed + other.exposed, self.collectives + other.collectives)

    def __mul__(self, count: int) -> Phase:
        """So many of them, one after the other."""
        return Phase(count * self.compute, count * self.exposed, count * self.collectives)


@dataclass(frozen=True)
class Layer:
    """Both directions of a layer, or of several in turn."""

    forward: Phase = Phase()
    backward: Phase = Phase()

    @property
    def total(self) -> float:
        """Milliseconds of both."""
        return self.forward.total + self.backward.total

    @property
    def both(self) -> Phase:
        """Forward, then backward."""
        return self.forward + self.backward

    def __add__(self, other: Layer) -> Layer:
        """One after the other."""
        return Layer(self.forward + other.forward, self.backward + other.backward)


def column_backward(rates: Rates, arm: str, m: int, n: int, k: int, tp: int, dgrad: Pair, before: float = 0.0) -> Phase:
    """Backward of a column-parallel linear with ``n`` outputs and ``k`` inputs a rank over ``m`` tokens.

    ``dgrad`` is its dgrad and reduce-scatter; in the ``before`` milliseconds before it flux gathers x and nothing else
    uses the link.
    """
    wgrad = rates.wgrad(n, k, m)
    compute = dgrad.gemm + wgrad
    nbytes = rates.gathered_bytes(m, k, tp)
    gather = rates.collective(nbytes, tp)
    total = rates.overlapped(dgrad.gemm, gather) + rates.overlapped(wgrad, dgrad.collective)
    # Where the tuner keeps stock's call of an FP8 dgrad, its reduce-scatter runs beside wgrad as stock's does.
    if arm == "flux" and (rates.precision is None or dgrad.fused < dgrad.serial):
        nbytes = 0 if rates.keep_gathered else nbytes
        late = max(0.0, rates.transfer(nbytes, tp) - before) if nbytes else 0.0
        total = max(dgrad.fused, late + dgrad.link) + wgrad + rates.disturbance(nbytes + dgrad.nbytes)
        if rates.chunks is not None:  # what is left of the reduce-scatter goes on beside wgrad
            unhidden = dgrad.fused - max(dgrad.gemm, dgrad.link) + rates.coding(nbytes / 2)
            total = max(dgrad.gemm + wgrad, late + dgrad.link) + unhidden
    return Phase(compute, total - compute, gather + dgrad.collective)


def pair_phase(rates: Rates, pair: Pair, arm: str) -> Phase:
    """A collective and its GEMM, of which the second waits for the first."""
    total = pair.serial
    if arm == "flux":
        # Where the tuner keeps stock's call, there is nothing to disturb.
        total = pair.fused + (rates.disturbance(pair.nbytes) if pair.fused < pair.serial else 0.0)
    return Phase(pair.gemm, total - pair.gemm, pair.collective)


def predict_layer(
    rates: Rates, arm: str, shape: ModelShape, seq: int, micro_batch: int, tp: int, recompute: str = "none"
) -> Layer:
    """Predict one layer of ``shape`` in the arm ``baseline`` or ``flux``.

    Where it waits for a slow link, the power that it spares lets the clock rise: it is spent by the square of the clock
    for the same work, so that the clock is the root of the time over that of computation alone.
    """
    one = _layer(rates, arm, shape, seq, micro_batch, tp, recompute)
    if rates.kind not in SLOW or rates.calls is not None:  # calls are measured in bursts
        return one
    clock = min(SPARED, math.sqrt(one.total / one.both.compute))
    faster = _layer(replace(rates, clock=clock), arm, shape, seq, micro_batch, tp, recompute)
    both = zip((one.forward, one.backward), (faster.forward, faster.backward), strict=True)
    return Layer(*(Phase(at.compute, up.total - at.compute, at.collectives) for at, up in both))


def _layer(rates: Rates, arm: str, shape: ModelShape, seq: int, micro_batch: int, tp: int, recompute: str) -> Layer:
    m = seq * micro_batch
    back = rates.of_gradients
    dgrad = {case.layer: (case, back.pair(case, tp)) for case in layer_cases("", shape, m, "dgrad", tp)}
    flops = 2 * seq * seq * shape.hidden_size * micro_batch / tp
    attention = 1e3 * flops / (rates.device.attention * rates.device.peak_flops)
    stream_forward, stream_backward = map(rates.streamed, streamed_bytes(shape, m, tp))
    gap = rates.calibration.gap_ms / 3  # a third of the kernels are forward's

    forward = Phase()
    for case in layer_cases("", shape, m, "forward", tp):
        forward += pair_phase(rates, rates.pair(case, tp), arm)
    quantise_forward, quantise_backward = map(rates.quantising, quantised_numbers(shape, m, tp))
    forward += Phase(attention + stream_forward + quantise_forward + gap)

    backward = Phase(2.5 * attention + stream_backward + quantise_backward + 2 * gap)
    wgrad = {name: rates.wgrad(case.k, case.n, m) for name, (case, _) in dgrad.items()}
    before = {"qkv": wgrad["proj"] + 2.5 * attention, "fc1": wgrad["fc2"]}
    for name, (case, pair) in dgrad.items():
        if name in before:  # dgrad [m, k] has the linear's outputs as its k and its inputs as its n
            backward += column_backward(rates, arm, m, case.k, case.n, tp, pair, before[name])
        else:  # dy is gathered once, for dgrad and wgrad
            backward += pair_phase(rates, pair, arm) + Phase(wgrad[name])
            if rates.precision is not None and rates.precision.rows_twice:
                again = rates.gathered_bytes(m, case.k, tp)
                alone = rates.transfer(again, tp) if arm == "flux" else rates.collective(again, tp)
                backward += Phase(0.0, alone, alone)
    if recompute == "full":
        backward += forward
    elif recompute == "selective":
        backward += Phase(attention)
    return Layer(forward, backward)


def streamed_bytes(shape: ModelShape, m: int, tp: int) -> tuple[float, float]:
    """Bytes that a rank's norms, residuals, activation and copies read and write, forward and backward."""
    rows = 2 * m / tp * shape.hidden_size  # of two norms, and of two residuals
    mlp, wide = m * shape.ffn_hidden_size / tp, m * shape.qkv_size / tp
    # Forward: norms twice, residuals three times; backward: both three times. The gated models have no biases.
    if shape.gated:
        return 2 * (5 * rows + 3 * mlp), 2 * (6 * rows + 5 * mlp + 2 * wide)
    return 2 * (5 * rows + 2 * mlp), 2 * (6 * rows + 4 * mlp + 3 * wide)


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
    one = predict_layer(rates, arm, *job.sizes, run.recompute)
    if layers is not None and run.recompute == "none":
        one = _measured(one, layers, arm, job)
    late = count * max(0.0, rates.host_ms(arm) - one.total)
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
    total = layers.ms(arm, *job.sizes, wire=job.wire, grad_wire=job.grad_wire, fp8=job.fp8)
    floor = layers.ms("floor", *job.sizes, fp8=job.fp8)
    if total is None or (arm == "flux" and job.keep_gathered):  # benchmarks keep nothing
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
    rates = replace(rates, fp8=None)  # layers alone are in FP8
    m, h, tp = job.tokens, job.run.shape.hidden_size, job.run.tp
    columns = job.run.padded_vocab_size // tp
    small = Phase(rates.streamed(BYTES_PER_LOGIT * m * columns) / 2 + rates.streamed(2 * m / tp * h * 5) / 2)
    logits = rates.pair(Case("all_gather_gemm", "", "output", "forward", m, columns, h), tp)
    dgrad = rates.of_gradients.pair(Case("gemm_reduce_scatter", "", "output", "dgrad", m, h, columns), tp)
    backward = column_backward(rates, arm, m, columns, h, tp, dgrad)
    return Layer(pair_phase(rates, logits, arm) + small, backward + small)


def add_up(job: Job, rates: Rates, stages: list[Stage]) -> dict[str, float]:
    """Milliseconds of the step of these stages: ``total`` is ``pipeline`` + ``data`` (exposed) + ``optimizer``.

    Parts of ``pipeline``: ``bubble`` (the slowest stage waits), ``point_to_point`` (exposed sends), and of the slowest
    stage ``tp_exposed`` (tensor-parallel communication), ``vocabulary`` (embedding and output layer), ``host`` (beyond
    the GPU's time). ``tp_collectives``: what those take by themselves. ``mfu`` is a share of the peak, which of layers
    in FP8 is twice bf16's.
    """
    run, chunks, hop = job.run, job.virtual_pipeline, 0.0
    if run.pp > 1:  # by the slowest link that any pair of neighbours has; a rank sends its own rows
        rows = 2 * job.tokens * run.shape.hidden_size / run.tp
        hop = rates.within_node(rows) if job.run.world_size <= job.gpus_per_node else rates.network(rows)
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
        "mfu": flops / (total / 1e3) / (rates.device.peak_flops * (1 if rates.fp8 is None else 2)),
        "tflops_per_gpu": flops / (total / 1e3) / 1e12,
    }


def _data(job: Job, rates: Rates, count: int, forward: float, backward: float) -> float:
    """Exposed milliseconds of data-parallel communication of a stage with ``count`` parameters a rank."""
    run = job.run
    if run.dp == 1:
        return 0.0

    def ring(nbytes: float) -> float:
        local = rates.within_node(nbytes)
        if job.run.world_size <= job.gpus_per_node or job.peers_in_node == run.dp:
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
    run, shape, tokens, chunks = job.run, job.run.shape, job.tokens, job.virtual_pipeline
    count, hidden, tp = stage_parameters(job, index), shape.hidden_size, run.tp
    held = run.pp - index  # micro-batches
    if chunks > 1:
        held = (2 * (run.pp - index - 1) + (chunks - 1) * run.pp + 1) / chunks
    held = min(held, run.micro_batches)
    activations = held * job.layers_per_stage * layer_activations(shape, tokens, tp, run.recompute, run.dropout > 0)
    if arm == "flux" and job.keep_gathered and run.recompute != "full":  # x of QKV and of FC1, of all ranks
        activations += held * job.layers_per_stage * 2 * 2 * tokens * hidden
    if index == 0 and run.dropout > 0:
        activations += held * tokens * hidden / tp
    if index == run.pp - 1:
        activations += tokens * (4 * hidden + 8 * run.padded_vocab_size) / tp
    working = working_memory(shape, tokens, tp)
    if run.recompute == "full":
        working += layer_activations(shape, tokens, tp, dropout=run.dropout > 0)
    fp8_copies = 0 if job.fp8 is None else 2 * job.layers_per_stage * shape.layer_weights // tp  # and transposed
    found = {
        "parameters": 2 * count + fp8_copies,
        "gradients": 4 * count,
        "optimizer": 12 * count / (run.dp if run.distributed_optimizer else 1),
        "activations": activations,
        "working": working,
        "flux_workspace": flux_workspace(tokens, hidden, job.link) if arm == "flux" and tp > 1 else 0.0,
    }
    gb = {name: nbytes / 1e9 for name, nbytes in found.items()}
    return gb | {"total": sum(gb.values())}


def stage_parameters(job: Job, index: int) -> int:
    """Parameters of one rank of stage ``index``."""
    shape, tp, pp = job.run.shape, job.run.tp, job.run.pp
    count = job.layers_per_stage * layer_parameters(shape, tp)
    table = job.run.padded_vocab_size * shape.hidden_size // tp
    if index == 0:
        count += table + (shape.seq_length * shape.hidden_size if shape.position_embedding == "learned_absolute" else 0)
    if index == pp - 1:
        count += table + norm_parameters(shape)
    return count


def layer_activations(shape: ModelShape, tokens: int, tp: int, recompute: str = "none", dropout: bool = False) -> float:
    """Bytes that a layer keeps of a micro-batch of ``tokens`` on one rank."""
    hidden = 2 * tokens * shape.hidden_size / tp
    if recompute == "full":
        return hidden
    return shapes.layer_activations(shape, tokens, tp) + (hidden if dropout else 0)


def layer_parameters(shape: ModelShape, tp: int) -> int:
    """Parameters of a layer on one rank: linears split over tp, two norms on every rank."""
    h = shape.hidden_size
    # Biases of row-parallel linears are whole on every rank.
    biases = (shape.qkv_size + shape.fc1_size) // tp + 2 * h if shape.bias else 0
    return shape.layer_weights // tp + 2 * norm_parameters(shape) + biases


def norm_parameters(shape: ModelShape) -> int:
    """Parameters of a norm: scales, and a LayerNorm's shifts."""
    return shape.hidden_size * (2 if shape.normalization == "LayerNorm" else 1)


def flux_workspace(tokens: int, hidden: int, link: str = "nvlink") -> int:
    """Bytes of flux's two slabs (:mod:`megatron_flux.comm.slab`), x gathered for GEMMs or partials, and x gathered for
    wgrad: each has two halves of the largest call, and flags. Over the link host there are none, but what a scatter
    sends and receives (:mod:`megatron_flux.ops.backends.chunked`).
    """
    if link == "host":
        return 2 * 2 * tokens * hidden
    return 2 * 2 * (size_class(2 * tokens * hidden) + 4 * FLAG_WORDS)
