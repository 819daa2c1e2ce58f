"""``slurm plan``: what a step of a job would take, stock and flux, before the job is paid for."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from megatron_flux.errors import UserError
from megatron_flux.estimate import slow_links
from megatron_flux.estimate.fp8 import LARGEST_ERROR as FP8_ERROR
from megatron_flux.estimate.job import Job, PlanOptions, resolve
from megatron_flux.estimate.measured import LARGEST_ERROR, LARGEST_SPEEDUP_ERROR
from megatron_flux.estimate.rates import MeasuredCalls, MeasuredLayers, Rates, read_layers, read_ops
from megatron_flux.estimate.step import add_up, predict_memory, predict_stages
from megatron_flux.kernels.wire_format import EXACT, INT8
from megatron_flux.ops.backends.fused import limit
from megatron_flux.train.config import RunConfig

ARMS = ("baseline", "flux")

REACHED_GB_PER_S = (300.0, 200.0, 150.0, 100.0, 70.0, 50.0, 35.0)
"""Rates that NCCL reaches per GPU in the sensitivity: from H200's NVLink to bridges between pairs of cards. What is
slower is no NVLink, and there flux runs stock."""

LOW_OVERLAP = 0.40
"""The lower of two overlap efficiencies in the sensitivity: the lowest mean of FLUX's paper (A100 PCIe)."""

NO_NVLINK = "no NVLink between the GPUs of a node: auto runs stock's collectives and GEMMs there, as NCCL carries them"
"""Why nothing is gained over PCIe."""

ROOM_GB = 6.0  # memory to leave to CUDA's context, NCCL and fragmentation


def predict_options(options: PlanOptions) -> dict[str, Any]:
    """:func:`predict` for what was asked on the command line: the user's figures in the place of the table's."""
    calls, layers = read_ops(options.ops), read_layers(options.layers)
    found = calls or layers
    own = found is not None and options.device in (None, found.device.key)
    job = resolve(options, found.device if found else None, found.link if found and own else None)
    for measured, option in ((calls, "--ops"), (layers, "--layers")):
        if measured and measured.device.key != job.device.key:
            both = f"{option} was measured on {measured.device.key}, the job is for {job.device.key}"
            raise UserError(f"{both}; leave out --device or the file")
        if measured and measured.link != job.link:
            both = f"{option} was measured over {measured.link}, the job's link is {job.link}"
            raise UserError(f"{both}; leave out --link or the file")
    network = options.network_gb_per_s or job.device.network_gb_per_s
    there = job.tp_in_node
    rates = Rates(
        device=job.device,
        calls=calls,
        # A tensor-parallel group across nodes runs at the network's rate.
        link_gb_per_s=options.link_gb_per_s if there else network * job.device.network / job.device.nccl,
        kind=job.link if there else None,
        gpus=min(job.gpus_per_node, job.run.world_size),
        wire=job.wire if there else EXACT,
        grad_wire=job.grad_wire if there else EXACT,
        keep_gathered=job.keep_gathered and there,
        fp8=job.fp8,
        network_gb_per_s=network,
        overlap=options.overlap_efficiency,
        host_ms_per_layer=options.host_ms_per_layer,
    )
    return predict(job, rates, layers)


def why_stock(job: Job) -> str | None:
    """None, or why flux's layers would run stock's collectives and GEMMs in this job.

    Over the link host chunks run that torch multiplies: any tp, any GPU. Of fused kernels, process groups beside the
    tensor-parallel one are taken to be kept from blocking them, as the job scripts do
    (``CUDA_DEVICE_MAX_CONNECTIONS=1``). Fused kernels asked for by name over PCIe are not planned: nothing is known of
    their speed there.
    """
    if job.run.tp == 1:
        return "tp = 1"
    if not job.tp_in_node:
        return f"no peer access within the group: tp {job.run.tp} spans nodes of {job.gpus_per_node} GPUs"
    if job.link == "host":
        return None
    reason = limit(torch.bfloat16, job.run.tp, job.device.capability, job.run.world_size, shielded=True)
    return NO_NVLINK if reason is None and job.link != "nvlink" else reason


def predict(job: Job, rates: Rates, layers: MeasuredLayers | None = None) -> dict[str, Any]:
    """The whole prediction, ready for JSON. Times are milliseconds, memory GB (1e9 bytes) per GPU.

    Measured ``layers`` replace predicted ones. ``speedup_undisturbed`` is the speed-up if what flux receives while it
    computes cost the layer nothing: the disturbance is known from one kind of machine only.
    """
    reason, run = why_stock(job), job.run
    sizes = ("preset", "tp", "pp", "dp", "micro_batch_size", "global_batch_size", "micro_batches", "recompute")
    switches = ("dropout", "distributed_optimizer", "overlap_grad_reduce")
    arms: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        effective = "baseline" if reason else arm
        step = add_up(job, rates, predict_stages(job, rates, effective, layers))
        arms[arm] = {"step": step, "memory": predict_memory(job, effective)}
    undisturbed = 1.0
    if reason is None:  # measured layers are disturbed ones: both sides are predicted here
        calm = replace(rates, calibration=replace(rates.calibration, traffic=0.0))
        totals = [add_up(job, calm, predict_stages(job, calm, arm))["total"] for arm in ARMS]
        undisturbed = totals[0] / totals[1]
    return {
        "kind": "Prediction",  # written in everything that leaves here
        "job": {
            **{name: getattr(run, name) for name in (*sizes, *switches)},
            "overlap_param_gather": job.overlap_param_gather,
            "virtual_pipeline": job.virtual_pipeline,
            "gpus": run.world_size,
            "nodes": -(-run.world_size // job.gpus_per_node),
            "device": job.device.key,
            "link": job.link,
            "wire": job.wire,
            "grad_wire": job.grad_wire,
            "keep_gathered": job.keep_gathered,
            "fp8": job.fp8,
            "shape": run.shape.model_dump(),
            "padded_vocab_size": run.padded_vocab_size,
            "tokens_per_step": run.tokens_per_step,
        },
        "inputs": _describe_inputs(rates, layers),
        "arms": arms,
        "speedup": arms["baseline"]["step"]["total"] / arms["flux"]["step"]["total"],
        "speedup_undisturbed": undisturbed,
        "flux_runs_stock": reason,
        "fits": {arm: arms[arm]["memory"]["total"] + ROOM_GB <= job.device.memory_gb for arm in ARMS},
        "sensitivity": _sensitivity(job, rates) if reason is None and job.link == "nvlink" else [],
        "choices": _choices(job, rates) if reason is None and job.link == "host" else [],
        "notes": _notes(job, rates.calls, layers, reason, arms["baseline"]["memory"]),
    }


def _sensitivity(job: Job, rates: Rates) -> list[dict[str, Any]]:
    """Step times over the rate that NCCL reaches in a node, all else as it is, but for measured layers. ``flux_low``
    has :data:`LOW_OVERLAP`, or its own overlap efficiency if that is lower.
    """
    own, rows = rates.reached, []
    low = min(LOW_OVERLAP, rates.overlap if rates.overlap is not None else job.device.overlap)
    for rate in sorted({own, *(rate for rate in REACHED_GB_PER_S if not 0.9 < rate / own < 1.1)}, reverse=True):
        there = replace(rates, link_gb_per_s=rate * rates.link / own)
        arms = (("baseline", there), ("flux", there), ("flux", replace(there, overlap=low)))
        steps = [add_up(job, of, predict_stages(job, of, arm)) for arm, of in arms]
        baseline, flux, flux_low = (step["total"] for step in steps)
        row = {"reached_gb_per_s": rate, "baseline_ms": baseline, "flux_ms": flux, "flux_low_ms": flux_low}
        row["tp_exposed_share"] = steps[0]["tp_exposed"] / baseline
        rows.append(row | {"speedup": baseline / flux, "speedup_low": baseline / flux_low})
    return rows


def _choices(job: Job, rates: Rates) -> list[dict[str, Any]]:
    """Step times, and memory, of what flux can send and keep over the link host; but for measured layers."""
    baseline, rows = add_up(job, rates, predict_stages(job, rates, "baseline"))["total"], []
    for bits, wire in ((16, EXACT), (8, INT8)):
        for keep in (False, True):
            there = replace(rates, wire=wire, grad_wire=wire, keep_gathered=keep)
            flux = add_up(job, there, predict_stages(job, there, "flux"))["total"]
            memory = predict_memory(replace(job, keep_gathered=keep), "flux")["total"]
            row = {"bits": bits, "keep_gathered": keep, "flux_ms": flux, "speedup": baseline / flux}
            rows.append(row | {"memory_gb": memory})
    return rows


def _describe_inputs(rates: Rates, layers: MeasuredLayers | None) -> dict[str, Any]:
    device, calls = rates.device, rates.calls
    return {
        "gemms": ", ".join(calls.sources) if calls else f"table of devices ({device.key})",
        "layers": layers.source if layers else None,
        "peak_tflops": device.peak_flops / 1e12,
        "link_gb_per_s": rates.link,
        "nccl_reaches_gb_per_s": rates.reached,
        "chunks_reach_gb_per_s": rates.chunks,
        "network_gb_per_s": rates.network_gb_per_s,
        "overlap_efficiency": rates.overlap if rates.overlap is not None or calls or rates.chunks else device.overlap,
        "host_ms_per_layer": rates.host_ms_per_layer,
        "calibration": asdict(rates.calibration),
    }


def bytes_against_weights(run: RunConfig) -> float:
    """What tensor parallelism sends for a layer and micro-batch, over what sharded weights would; 0 with tp 1.

    Ten collectives of m x hidden (m tokens), forward and backward (docs/design.md), against two all-gathers and a
    reduce-scatter of the layer's weights, all in one dtype: equal at m = 3.6 x hidden where a layer has 12 x hidden^2
    weights.
    """
    if run.tp == 1:
        return 0.0
    rows = run.micro_batch_size * run.shape.seq_length
    return 10 * rows * run.shape.hidden_size / (3 * run.shape.layer_weights)


def _notes(
    job: Job, calls: MeasuredCalls | None, layers: MeasuredLayers | None, reason: str | None, memory: dict[str, float]
) -> list[str]:
    run, key, notes = job.run, job.device.key, []
    if reason:
        notes.append(f"flux runs stock in this job: {reason}")
    if layers is not None and (run.recompute != "none" or layers.ms("baseline", *job.sizes, fp8=job.fp8) is None):
        notes.append(f"no row of this layer, sequence, micro-batch and tp in {layers.source}: it was not used")
    if memory["total"] + ROOM_GB > job.device.memory_gb:
        notes.append(
            f"the baseline needs {memory['total']:.0f} GB of {job.device.memory_gb:.0f} GB with {ROOM_GB:.0f} GB to "
            "spare: raise --pp or --tp, lower --micro-batch-size, or use --recompute full"
        )
    if (times := bytes_against_weights(run)) > 1:
        notes.append(
            f"with micro-batches of {run.micro_batch_size * run.shape.seq_length:,} tokens tensor parallelism moves "
            f"{times:.1f} times the bytes that gathering the layers' weights and scattering their gradients over the "
            "same GPUs would (fully sharded data parallelism): use a smaller --tp, or a smaller --micro-batch-size"
        )
    both = memory["total"] + sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
    notes.append(f"a compare job holds both arms' parameters, gradients and optimizer: {both:.0f} GB per GPU")
    if reason is None and job.link == "host":
        room = max(0.0, job.device.memory_gb - memory["total"] - ROOM_GB) / 4
        notes.append(
            "unless told otherwise flux keeps gathered inputs for wgrad, in a quarter of what a step leaves (here "
            f"{room:.1f} GB) or in --keep-gathered-bytes; --keep-gathered plans as if all had room"
        )
    if job.fp8 is not None:
        notes.append(
            f"FP8: stock's layers were off by up to {FP8_ERROR:.0%} where that could be checked (two models, 4 H200s, "
            "tp 4); flux's kernels were measured on one GPU, its FP8 layers have not been. Activations count as in bf16"
        )
    if job.link != "nvlink" and job.tp_in_node and run.tp > 1:
        notes.append(slow_links.origin(job.link, key, min(job.gpus_per_node, run.world_size), calls is not None))
    elif key != "h200":
        notes.append(f"flux's kernels and the constants of whole layers were measured on H200, not on {key}")
    if job.link != "nvlink":
        return notes
    if run.tp != 4:
        notes.append(f"flux was measured with tp 4, not tp {run.tp}")
    notes.append(
        f"where predictions could be checked (slurm/PLAN.md), layers were off by up to {LARGEST_ERROR:.1%} and flux's "
        f"speed-up by up to {LARGEST_SPEEDUP_ERROR:.3f}; whole steps have not been checked"
    )
    return notes
