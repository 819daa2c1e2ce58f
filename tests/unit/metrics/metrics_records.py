"""Synthetic records of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_flux.metrics import schema
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.metrics.summary import summarize, write_summary

Record = dict[str, Any]


def record(iteration: int, *, flux: bool = False, **changes: Any) -> Record:
    """A full record with ``changes`` to its fields."""
    values: Record = {
        "iteration": iteration,
        "lm loss": 5.0 - 0.1 * iteration,
        "grad-norm": 1.5,
        "learning-rate": 1e-3,
        "iteration-time": 0.100,
        "throughput": 400.0,
        "tokens-per-second": 10_000.0,
        "mfu": 0.4,
        "consumed-samples": 8 * iteration,
        "peak-memory-bytes": 2**30,
        "block": 0,
        "warmup": False,
        "flux/active_layers": 8 if flux else 0,
        "flux/all_gather_gemm_calls": 16 if flux else 0,
        "flux/gemm_reduce_scatter_calls": 16 if flux else 0,
        "flux/gemm_all_reduce_calls": 0,
        "flux/bytes_received": 4096 if flux else 0,
        "flux/fallback_calls": 0,
        "flux/fallbacks": {},
        "schema": schema.SCHEMA_VERSION,
        "flux/allocated_peak_bytes": 3 * 2**28 if flux else 2**30,
        "flux/workspace_bytes": 2**28 if flux else 0,
        "flux/kept_bytes": 0,
        "flux/inputs_kept": 0,
        "flux/inputs_gathered_again": 0,
        "timestamp": 1_700_000_000.0 + iteration,
        "flux/sampled": False,
        "flux/wait_timeouts": 0,
        "flux/metrics_ms": 0.08,
    }
    return values | changes


def sampled_record(iteration: int, *, flux: bool = False, ranks: int = 2, **changes: Any) -> Record:
    """A record with every field of the schema, as a sampled step that is the first after a start has them."""
    calls = [_call("all_gather_gemm", 64, 2.0, 1.6, 3.6), _call("gemm_reduce_scatter", 32, 1.5, 1.0, 2.0)]
    if not flux:
        calls = []
    sums = {
        field: {call["operator"]: call[f"{key}_ms"] * call["calls"] for call in calls}
        for field, key in (
            ("flux/operator_time_ms", "time"),
            ("flux/gemm_time_ms", "gemm"),
            ("flux/serial_time_ms", "serial"),
            ("flux/exposed_communication_ms", "exposed"),
        )
    }
    operators = sum(sums["flux/operator_time_ms"].values())
    values: Record = {
        "lm loss validation": 5.1 - 0.1 * iteration,
        "flux/host_memory_bytes": 2**29,
        "profiled": False,
        "flux/sampled": True,
        **sums,
        "flux/e_overlap": {call["operator"]: call["e_overlap"] for call in calls},
        "flux/calls": calls,
        "flux/choices": {
            "all_gather_gemm m=64 n=96 k=32 bfloat16 [n,k] tp=2": {
                "backend": "fused",
                "plan": {"bm": 128, "bn": 256},
                "ms": {"reference": 3.6, "pipelined": 2.4, "fused default": 2.0},
            }
        }
        if flux
        else {},
        "flux/slowest_rank": ranks - 1,
        "flux/rank_spread_ms": 1.5,
        "flux/ranks": {
            "step_ms": [100.0] * ranks,
            "operators_ms": [operators] * ranks,
            "peak_memory_bytes": [2**30] * ranks,
            "sm_clock_mhz": [1980.0] * ranks,
            "memory_clock_mhz": [2619.0] * ranks,
            "power_w": [600.0] * ranks,
            "temperature_c": [50.0] * ranks,
        },
        "flux/gpu": {
            "sm_clock_mhz_min": 1980.0,
            "sm_clock_mhz_mean": 1980.0,
            "memory_clock_mhz_min": 2619.0,
            "power_w_mean": 600.0,
            "power_w_max": 600.0,
            "temperature_c_max": 50.0,
        },
        "flux/throttle_reasons": {"sw_power_cap": 1},
        "flux/run": {
            "arm": "flux" if flux else "baseline",
            "resumed_from": None,
            "wandb_id": "abcd1234",
            "job": {"id": "4711", "name": "gpt3", "restart": "0"},
            "nodes": ["node1"],
            "node_of_rank": [0] * ranks,
            "ranks": ranks,
            "tp": ranks,
            "dp": 1,
            "link": "nvlink",
            "wire": "exact",
            "grad_wire": "exact",
            "device": "NVIDIA H200",
            "peak_tflops": 989.4,
            "peak_source": "NVIDIA data sheet, dense bf16",
            "gpu_source": "NVML, driver 570.00",
            "operator_source": "events around the host's calls",
            "sample_interval": 10,
            "versions": {"torch": "2.11.0", "megatron-core": "0.16.1"},
            "environment": {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        },
    }
    return record(iteration, flux=flux) | values | changes


def _call(operator: str, calls: int, time: float, gemm: float, serial: float) -> dict[str, Any]:
    """One entry of ``flux/calls``."""
    return {
        "operator": operator,
        "m": 64,
        "n": 96,
        "k": 32,
        "dtype": "bfloat16",
        "transposed": False,
        "tp": 2,
        "backend": "tuned: fused default",
        "calls": calls,
        "time_ms": time,
        "gemm_ms": gemm,
        "serial_ms": serial,
        "exposed_ms": time - gemm,
        "e_overlap": (serial - time) / (serial - gemm),
        "source": "measured",
        "sm_clock_mhz": 1980.0,
        "withheld": None,
    }


def breakdown(*, flux: bool = False) -> dict[str, Any]:
    """A ``breakdown.json``; its parts add up to its span."""
    parts = dict.fromkeys(schema.BREAKDOWN_PARTS, 0.0)
    parts |= {"gemm": 40.0, "attention": 20.0, "norm": 5.0, "optimizer": 8.0, "other": 7.0, "idle": 2.0}
    parts |= {"fused": 12.0, "communication_exposed": 1.0} if flux else {"communication_exposed": 18.0}
    return {
        "schema": schema.SCHEMA_VERSION,
        "steps": [5, 7],
        "rank": 0,
        "source": "gpu",
        "span_ms": sum(parts.values()),
        "parts": parts,
        "communication_hidden_ms": 3.0,
        "launches": 900.0,
    }


def interleaved(pairs: int, times: dict[str, list[float]], per_block: int = 3) -> dict[str, list[Record]]:
    """A B B A blocks; ``times[variant]`` is the step time of each block of that variant, in seconds."""
    variants: dict[str, list[Record]] = {"baseline": [], "flux": []}
    for pair in range(pairs):
        order = ("baseline", "flux") if pair % 2 == 0 else ("flux", "baseline")
        for position, variant in enumerate(order):
            for _ in range(per_block):
                changes = {"iteration-time": times[variant][pair], "block": 2 * pair + position}
                variants[variant].append(record(len(variants[variant]) + 1, flux=variant == "flux", **changes))
    return variants


def write_run(folder: Path, variants: dict[str, list[Record]], info: dict[str, Any]) -> Path:
    """A run folder as compare leaves it, without its report."""
    for variant, records in variants.items():
        with JsonlRecorder(folder / variant / "metrics.jsonl") as recorder:
            for item in records:
                recorder.write(item)
    (folder / "config.json").write_text(json.dumps(info))
    write_summary(folder / "summary.json", summarize(variants["baseline"], variants["flux"], info))
    return folder
