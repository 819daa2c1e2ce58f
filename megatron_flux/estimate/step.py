"""A training step from its stages: pipeline, data parallelism, optimizer.

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

from megatron_flux.estimate.memory import stage_parameters
from megatron_flux.estimate.options import Job
from megatron_flux.estimate.rates import Rates
from megatron_flux.estimate.stage import Stage
from megatron_flux.train.flops import step_flops

OPTIMIZER_BYTES = 42


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


def predict_step(job: Job, rates: Rates, stages: list[Stage], network_gb_per_s: float) -> Step:
    """Add a step up; ``network_gb_per_s`` is a GPU's share of its node's adapters, in one direction."""
    run, chunks = job.run, job.virtual_pipeline
    hop = _hop(job, rates, network_gb_per_s)
    each = [stage.total + (2 * hop if chunks == 1 else 0.0) for stage in stages]
    slowest = max(range(run.pp), key=each.__getitem__)
    worst, steady = stages[slowest], run.micro_batches * each[slowest]
    ramp = 2 * (run.pp - 1) * hop if chunks > 1 else 0.0
    bubble = (sum(each) - each[slowest]) / chunks
    pipeline = steady + bubble + ramp
    data = max(_data(job, rates, index, stage, network_gb_per_s) for index, stage in enumerate(stages))
    optimizer = max(_optimizer(job, rates, index) for index in range(run.pp))
    total = pipeline + data + optimizer
    flops = step_flops(run.shape, run.global_batch_size) / run.world_size
    waits = 2 * hop * run.micro_batches if chunks == 1 else ramp
    return Step(
        pipeline=pipeline,
        bubble=bubble,
        point_to_point=waits,
        tp_exposed=run.micro_batches * worst.exposed,
        tp_collectives=run.micro_batches * worst.collectives,
        vocabulary=run.micro_batches * (worst.vocabulary.forward.total + worst.vocabulary.backward.total),
        host=run.micro_batches * worst.host,
        data=data,
        optimizer=optimizer,
        total=total,
        mfu=flops / (total / 1e3) / rates.device.peak_flops,
        tflops_per_gpu=flops / (total / 1e3) / 1e12,
    )


def _hop(job: Job, rates: Rates, network: float) -> float:
    """Milliseconds of one send between neighbouring stages, by the slowest link that any pair has."""
    if job.run.pp == 1:
        return 0.0
    nbytes = 2 * job.tokens * job.run.shape.hidden_size / job.run.tp
    if job.gpus <= job.gpus_per_node:
        return nbytes / (rates.device.nccl * rates.link * 1e6)
    return rates.network(nbytes, network)


def _data(job: Job, rates: Rates, index: int, stage: Stage, network: float) -> float:
    """Exposed milliseconds of a stage's data-parallel communication."""
    run, count = job.run, stage_parameters(job, index)
    if run.dp == 1:
        return 0.0
    moved = (run.dp - 1) / run.dp * count
    gradients = _ring(job, rates, 4 * moved * (1 if run.distributed_optimizer else 2), network)
    parameters = _ring(job, rates, 2 * moved, network) if run.distributed_optimizer else 0.0
    bucket = min(1.0, max(40e6, 1e6 * run.dp) / count)
    if run.overlap_grad_reduce:
        gradients = max(bucket * gradients, gradients - stage.backward)
    if job.overlap_param_gather:
        parameters = max(bucket * parameters, parameters - stage.forward)
    return gradients + parameters


def _ring(job: Job, rates: Rates, nbytes: float, network: float) -> float:
    local = nbytes / (rates.device.nccl * rates.link * 1e6)
    if job.gpus <= job.gpus_per_node or job.peers_in_node == job.run.dp:
        return local
    return max(local, rates.network(nbytes, network * job.peers_in_node))


def _optimizer(job: Job, rates: Rates, index: int) -> float:
    count = stage_parameters(job, index)
    shard = count / (job.run.dp if job.run.distributed_optimizer else 1)
    return rates.memory(OPTIMIZER_BYTES * shard + 4 * count)
