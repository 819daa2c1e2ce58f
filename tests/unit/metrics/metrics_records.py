"""Synthetic records of a comparison."""

import json
from pathlib import Path
from typing import Any

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.metrics.summary import summarize
from tests.documented import example, fields

Record = dict[str, Any]

FIELDS = fields("record")
RARE = {"flux/run", "flux/choices", "flux/host_memory_bytes", "profiled"}


def record(iteration: int, *, flux: bool = False, **changes: Any) -> Record:
    """A record of a step that was not sampled, with ``changes`` to its fields."""
    every = example("record").items()
    values = {name: value for name, value in every if "(sampled)" not in FIELDS[name][1] and name not in RARE}
    values |= {"iteration": iteration, "consumed-samples": 8 * iteration, "timestamp": 1_700_000_000.0 + iteration}
    values |= {"lm loss": 5.0 - 0.1 * iteration, "grad-norm": 1.5, "learning-rate": 1e-3, "schema": 1}
    values |= {"iteration-time": 0.1, "throughput": 400.0, "tokens-per-second": 10_000.0, "mfu": 0.4}
    values |= {"peak-memory-bytes": 2**30, "flux/allocated_peak_bytes": 2**30}
    if flux:
        values |= {"flux/allocated_peak_bytes": 3 * 2**28, "flux/workspace_bytes": 2**28, "flux/active_layers": 8}
        values |= {"flux/all_gather_gemm_calls": 16, "flux/gemm_reduce_scatter_calls": 16, "flux/bytes_received": 4096}
    return values | changes


def sampled_record(iteration: int, *, flux: bool = False, ranks: int = 2, **changes: Any) -> Record:
    """A record with every field of the schema, as a sampled step that is the first after a start has them."""
    calls = [_call("all_gather_gemm", 64, 2.0, 1.6, 3.6), _call("gemm_reduce_scatter", 32, 1.5, 1.0, 2.0)] * flux

    def sums(key: str) -> dict[str, float]:
        return {call["operator"]: call[key] * call["calls"] for call in calls}

    of_gpu = {"sm_clock_mhz": 1980.0, "memory_clock_mhz": 2619.0, "power_w": 600.0, "temperature_c": 50.0}
    of_rank = {"step_ms": 100.0, "operators_ms": sum(sums("time_ms").values()), "peak_memory_bytes": 2**30, **of_gpu}
    run = {"arm": "flux" if flux else "baseline", "nodes": ["node1"], "node_of_rank": [0] * ranks, "ranks": ranks}
    run |= {"tp": ranks, "dp": 1, "environment": {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    values = example("record") | record(iteration, flux=flux)
    return values | {
        "flux/host_memory_bytes": 2**29,
        "flux/sampled": True,
        "flux/operator_time_ms": sums("time_ms"),
        "flux/gemm_time_ms": sums("gemm_ms"),
        "flux/serial_time_ms": sums("serial_ms"),
        "flux/exposed_communication_ms": sums("exposed_ms"),
        "flux/e_overlap": {call["operator"]: call["e_overlap"] for call in calls},
        "flux/calls": calls,
        "flux/choices": {"all_gather_gemm m=64 n=96 k=32 bfloat16 [n,k] tp=2": {"backend": "fused"}} if flux else {},
        "flux/ranks": {name: [value] * ranks for name, value in of_rank.items()},
        "flux/gpu": {"sm_clock_mhz_min": 1980.0, "power_w_max": 600.0},
        "flux/throttle_reasons": {"sw_power_cap": 1},
        "flux/run": example("run") | run,
        **changes,
    }


def _call(operator: str, calls: int, time: float, gemm: float, serial: float) -> dict[str, Any]:
    return example("calls") | {
        **{"operator": operator, "m": 64, "n": 96, "k": 32, "dtype": "bfloat16", "tp": 2, "withheld": None},
        **{"backend": "tuned: fused default", "calls": calls, "time_ms": time, "gemm_ms": gemm, "serial_ms": serial},
        **{"exposed_ms": time - gemm, "e_overlap": (serial - time) / (serial - gemm), "source": "measured"},
    }


def interleaved(pairs: int, times: dict[str, list[float]]) -> dict[str, list[Record]]:
    """A B B A blocks of three steps; ``times[variant]`` is the step time of each block of that variant, in seconds."""
    variants: dict[str, list[Record]] = {"baseline": [], "flux": []}
    for pair in range(pairs):
        order = ("baseline", "flux") if pair % 2 == 0 else ("flux", "baseline")
        for position, variant in enumerate(order):
            for _ in range(3):
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
    strict_json.write(folder / "summary.json", summarize(variants["baseline"], variants["flux"], info))
    return folder
