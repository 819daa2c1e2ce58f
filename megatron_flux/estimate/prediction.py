"""``slurm plan``: what a step of a job would take, stock and flux, before the job is paid for. A prediction throughout.

The parts, each with its formulae and their source: :mod:`~megatron_flux.estimate.rates` (single calls),
:mod:`~megatron_flux.estimate.layer`, :mod:`~megatron_flux.estimate.stage`, :mod:`~megatron_flux.estimate.step`
and :mod:`~megatron_flux.estimate.memory`; :mod:`~megatron_flux.estimate.validate` says how far they are off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megatron_flux.estimate.devices import LOW_OVERLAP
from megatron_flux.estimate.layer import ARMS
from megatron_flux.estimate.measured import MeasuredCalls, MeasuredLayers
from megatron_flux.estimate.memory import Memory, predict_memory
from megatron_flux.estimate.options import Job
from megatron_flux.estimate.rates import Rates
from megatron_flux.estimate.stage import layer_model, predict_stages
from megatron_flux.estimate.step import Step, predict_step
from megatron_flux.estimate.validate import LARGEST_ERROR, LARGEST_SPEEDUP_ERROR
from megatron_flux.ops.backends.fused import limit

KIND = "Prediction"
"""Written in everything that leaves here."""

REACHED_GB_PER_S = (300.0, 200.0, 150.0, 100.0, 70.0, 50.0, 35.0)
"""Rates that NCCL reaches per GPU in the sensitivity: from H200's NVLink to bridges between pairs of cards. What is
slower is no NVLink, and there flux runs stock."""

NO_NVLINK = "no NVLink between the GPUs of a node: auto runs stock's collectives and GEMMs there, as NCCL carries them"
"""Why nothing is gained over PCIe."""

ROOM_GB = 6.0
"""Memory to leave to CUDA's context, NCCL and fragmentation."""


@dataclass(frozen=True)
class Inputs:
    """What a prediction starts from besides the job."""

    rates: Rates
    network_gb_per_s: float
    host_ms_per_layer: float
    layers: MeasuredLayers | None = None


def inputs(
    job: Job,
    *,
    calls: MeasuredCalls | None = None,
    layers: MeasuredLayers | None = None,
    link_gb_per_s: float | None = None,
    network_gb_per_s: float | None = None,
    overlap: float | None = None,
    host_ms_per_layer: float = 0.0,
) -> Inputs:
    """Put the user's figures in the place of the table's; tp across nodes runs at the network's rate."""
    network = network_gb_per_s or job.device.network_gb_per_s
    if not job.tp_in_node:
        link_gb_per_s = network * job.device.network / job.device.nccl
    rates = Rates(device=job.device, calls=calls, link_gb_per_s=link_gb_per_s, overlap=overlap)
    return Inputs(rates, network, host_ms_per_layer, layers)


def why_stock(job: Job) -> str | None:
    """None, or why flux's layers would run stock's collectives and GEMMs in this job.

    Process groups beside the tensor-parallel one are taken to be kept from blocking it, as the job scripts do
    (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Fused kernels asked for by name over PCIe are not planned: nothing is known of
    their speed there.
    """
    if job.run.tp == 1:
        return "tp = 1"
    if not job.tp_in_node:
        return f"no peer access within the group: tp {job.run.tp} spans nodes of {job.gpus_per_node} GPUs"
    reason = limit(torch.bfloat16, job.run.tp, job.device.capability, job.gpus, shielded=True)
    return NO_NVLINK if reason is None and job.device.link != "nvlink" else reason


def predict(job: Job, given: Inputs) -> dict[str, Any]:
    """The whole prediction, ready for JSON. Times are milliseconds, memory GB (1e9 bytes) per GPU.

    ``speedup_undisturbed`` is the speed-up if what flux receives while it computes cost the layer nothing: the
    disturbance is known from one kind of machine only.

    Args:
        job: the job.
        given: where its times come from.
    """
    reason = why_stock(job)
    arms: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        effective = "baseline" if reason else arm
        step = _step(job, given, given.rates, effective)
        memory = predict_memory(job, effective)
        arms[arm] = {"step": asdict(step), "memory": asdict(memory) | {"total": memory.total}}
    stock = arms["baseline"]["step"]["total"]
    calm = replace(given.rates, calibration=replace(given.rates.calibration, traffic=0.0))
    undisturbed = 1.0
    if reason is None:  # measured layers are disturbed ones: both sides are predicted here
        slow, fast = (_step(job, given, calm, arm, layers=False).total for arm in ARMS)
        undisturbed = slow / fast
    return {
        "kind": KIND,
        "job": _describe(job),
        "inputs": _describe_inputs(job, given),
        "arms": arms,
        "speedup": stock / arms["flux"]["step"]["total"],
        "speedup_undisturbed": undisturbed,
        "flux_runs_stock": reason,
        "fits": {arm: arms[arm]["memory"]["total"] + ROOM_GB <= job.device.memory_gb for arm in ARMS},
        "sensitivity": sensitivity(job, given) if reason is None else [],
        "notes": _notes(job, given, reason, predict_memory(job, "baseline")),
    }


def _step(job: Job, given: Inputs, rates: Rates, arm: str, layers: bool = True) -> Step:
    known = given.layers if layers else None
    stages = predict_stages(job, rates, arm, known, given.host_ms_per_layer)
    return predict_step(job, rates, stages, given.network_gb_per_s)


def sensitivity(job: Job, given: Inputs) -> list[dict[str, Any]]:
    """Step times over the rate that NCCL reaches between the GPUs of a node, measured layers left aside.

    Everything else stays: GEMMs, network, memory. ``flux`` keeps the overlap efficiency it has, ``flux_low`` has
    :data:`~megatron_flux.estimate.devices.LOW_OVERLAP` (or the own one, if that is lower).
    """
    own = reached(given.rates)
    device, rows = job.device, []
    others = (rate for rate in REACHED_GB_PER_S if not 0.9 < rate / own < 1.1)
    for rate in sorted({own, *others}, reverse=True):
        link = rate * given.rates.link / own
        low = min(LOW_OVERLAP, given.rates.overlap if given.rates.overlap is not None else device.overlap)
        baseline = _step(job, given, given.rates.at(link), "baseline", layers=False)
        flux = _step(job, given, given.rates.at(link), "flux", layers=False)
        flux_low = _step(job, given, given.rates.at(link, low), "flux", layers=False)
        rows.append(
            {
                "reached_gb_per_s": rate,
                "baseline_ms": baseline.total,
                "flux_ms": flux.total,
                "flux_low_ms": flux_low.total,
                "tp_exposed_share": baseline.tp_exposed / baseline.total,
                "speedup": baseline.total / flux.total,
                "speedup_low": baseline.total / flux_low.total,
            }
        )
    return rows


def reached(rates: Rates) -> float:
    """GB/s that NCCL reaches per GPU within a node, for long messages."""
    if rates.calls:
        return rates.link / rates.device.link_gb_per_s / rates.calls.ms_per_byte / 1e6
    return rates.device.nccl * rates.link


def _describe(job: Job) -> dict[str, Any]:
    run = job.run
    names = (
        "preset",
        "tp",
        "pp",
        "dp",
        "micro_batch_size",
        "global_batch_size",
        "micro_batches",
        "recompute",
        "dropout",
    )
    switches = ("distributed_optimizer", "overlap_grad_reduce")
    return {
        **{name: getattr(run, name) for name in (*names, *switches)},
        "overlap_param_gather": job.overlap_param_gather,
        "virtual_pipeline": job.virtual_pipeline,
        "gpus": job.gpus,
        "nodes": -(-job.gpus // job.gpus_per_node),
        "device": job.device.key,
        "shape": run.shape.model_dump(),
        "padded_vocab_size": run.padded_vocab_size,
        "tokens_per_step": run.tokens_per_step,
    }


def _describe_inputs(job: Job, given: Inputs) -> dict[str, Any]:
    rates = given.rates
    return {
        "gemms": ", ".join(rates.calls.sources) if rates.calls else f"table of devices ({job.device.key})",
        "layers": given.layers.source if given.layers else None,
        "peak_tflops": job.device.peak_flops / 1e12,
        "link_gb_per_s": rates.link,
        "nccl_reaches_gb_per_s": reached(rates),
        "network_gb_per_s": given.network_gb_per_s,
        "overlap_efficiency": rates.overlap
        if rates.overlap is not None
        else (None if rates.calls else job.device.overlap),
        "host_ms_per_layer": given.host_ms_per_layer,
        "calibration": asdict(rates.calibration),
    }


def _notes(job: Job, given: Inputs, reason: str | None, memory: Memory) -> list[str]:
    notes = []
    if reason:
        notes.append(f"flux runs stock in this job: {reason}")
    if given.layers is not None and not _used(job, given.layers):
        notes.append(f"no row of this layer, sequence, micro-batch and tp in {given.layers.source}: it was not used")
    if memory.total + ROOM_GB > job.device.memory_gb:
        notes.append(
            f"the baseline needs {memory.total:.0f} GB of {job.device.memory_gb:.0f} GB with {ROOM_GB:.0f} GB to "
            "spare: raise --pp or --tp, lower --micro-batch-size, or use --recompute full"
        )
    both = memory.total + memory.state
    notes.append(f"a compare job holds both arms' parameters, gradients and optimizer: {both:.0f} GB per GPU")
    if job.device.key != "h200":
        notes.append(f"flux's kernels and the constants of whole layers were measured on H200, not on {job.device.key}")
    if job.run.tp != 4:
        notes.append(f"flux was measured with tp 4, not tp {job.run.tp}")
    notes.append(
        f"where predictions could be checked (slurm/PLAN.md), layers were off by up to {LARGEST_ERROR:.1%} and flux's "
        f"speed-up by up to {LARGEST_SPEEDUP_ERROR:.3f}; whole steps have not been checked"
    )
    return notes


def _used(job: Job, layers: MeasuredLayers) -> bool:
    run, model = job.run, layer_model(job.run.shape)
    sizes = (model, run.shape.seq_length, run.micro_batch_size, run.tp)
    return run.recompute == "none" and layers.ms("baseline", *sizes) is not None
