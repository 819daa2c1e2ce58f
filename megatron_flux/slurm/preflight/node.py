"""``python -m megatron_flux.slurm.preflight.node``: check one node by itself, before a job begins.

Writes the report ``FOLDER/NODE.json`` and, if anything is wrong, ``FOLDER/NODE.problems`` with one line each; exit code
1 then. It meets no other node, so it cannot hang on one. Facts that the driver does not give are named.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

from megatron_flux import nvml
from megatron_flux.run.node import node_name
from megatron_flux.slurm.preflight import rules


def main() -> int:
    """Examine this node, write the report, and print its problems."""
    expected, name, began = rules.Expected.given(), node_name(), time.monotonic()
    expected.folder.mkdir(parents=True, exist_ok=True)
    try:
        report = examine(expected)
        problems = rules.node_problems(report, expected)
        for what in report["unknown"]:
            print(f"megatron-flux: pre-flight: {name}: not known: {what}", flush=True)
        (expected.folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    except Exception as error:  # a GPU that is broken fails in ways of its own; the node must be named all the same
        problems = [f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"]
    for problem in problems:
        print(f"megatron-flux: pre-flight: {problem}", file=sys.stderr)
    if problems:
        (expected.folder / f"{name}.problems").write_text("".join(f"{problem}\n" for problem in problems))
        return 1
    print(f"megatron-flux: pre-flight: {name} is ready ({time.monotonic() - began:.1f} s)", flush=True)
    return 0


def examine(expected: rules.Expected) -> dict[str, Any]:
    """Report this node: ``doctor``'s account, shared memory, each GPU; ``unknown`` could not be asked."""
    import torch

    from megatron_flux.comm import shared_memory
    from megatron_flux.telemetry import environment

    gpus: list[dict[str, Any]] = []
    unknown: list[str] = []
    report: dict[str, Any] = {"node": node_name(), "doctor": environment.examine(), "gpus": gpus, "unknown": unknown}
    report |= {"shared_memory": shared_memory.host_room(), "numactl": shutil.which("numactl") is not None}
    if expected.device != "cuda":
        return report
    count = torch.cuda.device_count()
    report["driver"] = ask_driver(count, unknown)
    for index, speed in enumerate(_gemm_tflops(count)):
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"name": torch.cuda.get_device_name(index), "memory_gib": round(total / 2**30, 2)}
        gpu |= {"used_by_others_gib": round((total - free) / 2**30, 2), "gemm_tflops": speed}
        gpus.append(gpu)
    return report


def ask_driver(count: int, unknown: list[str]) -> list[dict[str, Any]]:
    """Return the driver's account of each GPU, in CUDA's order; what it does not know is added to ``unknown``."""
    import torch

    try:
        return [nvml.of_device(torch.device("cuda", index)).health() for index in range(count)]
    except LookupError as error:
        if nvml.why_not() and not nvml.is_missing():
            return [{"error": str(error)}]
        unknown.append(str(error))
        return []


def _gemm_tflops(count: int, size: int = 8192, repeats: int = 20) -> list[float]:
    """Measure every GPU's bf16 TFLOP/s, all at work: a throttled one falls behind."""
    import torch

    operands, events = [], []
    for index in range(count):
        with torch.cuda.device(index):
            operands.append([torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2)])
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
    for _ in range(2):  # the first time is a warm-up
        for index, ((a, b), (begin, end)) in enumerate(zip(operands, events, strict=True)):
            with torch.cuda.device(index):
                begin.record()
                for _ in range(repeats):
                    a @ b
                end.record()
    for index in range(count):
        torch.cuda.synchronize(index)
    return [round(2 * size**3 * repeats / begin.elapsed_time(end) / 1e9, 1) for begin, end in events]


if __name__ == "__main__":
    sys.exit(main())
