"""``python -m megatron_flux.slurm.preflight``: one node, on its own, before a job begins.

Writes ``FOLDER/NODE.json`` with what it found and, if anything is wrong, ``FOLDER/NODE.problems`` with one line each;
exit code 1 then. It meets no other node, so it cannot hang on one. What all nodes must have in common is compared by
:mod:`megatron_flux.slurm.preflight_ranks`, which reads the reports.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_flux import nvml
from megatron_flux.run.node import node_name
from megatron_flux.slurm import preflight_floors as floors
from megatron_flux.slurm import preflight_hardware as hardware
from megatron_flux.slurm import preflight_rules as rules

_FIELDS = (
    "index",
    "memory.used",
    "clocks.max.sm",
    "clocks_throttle_reasons.hw_slowdown",
    "ecc.errors.uncorrected.volatile.total",
)


def options(words: list[str] | None = None) -> rules.Expected:
    """What a job's script expects of its nodes, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where reports and problems go")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--processes", type=int, required=True, help="processes, and with cuda GPUs, of a node")
    parser.add_argument("--link", choices=["nvlink", "pcie", "none"], required=True)
    parser.add_argument("--gpu-name", help="part of the GPUs' name")
    parser.add_argument("--gpu-memory-gib", type=int)
    parser.add_argument("--needs-numactl", action="store_true")
    parser.add_argument("--slow-fraction", type=float, default=0.8)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument(
        "--floors", type=floors.Floors.model_validate_json, default=floors.Floors(), help="least values, as JSON"
    )
    return rules.Expected(**vars(parser.parse_args(words)))


def examine_node(expected: rules.Expected) -> dict[str, Any]:
    """What this node is and has: ``doctor``'s findings, its network ports, and of each GPU memory, state and speed.

    ``unknown`` names what could not be asked.
    """
    import torch

    from megatron_flux.telemetry import doctor

    found: dict[str, Any] = {"node": node_name(), "doctor": doctor.examine(), "gpus": [], "xids": [], "unknown": []}
    found["numactl"] = shutil.which("numactl") is not None
    found["infiniband"] = hardware.infiniband()
    if expected.device == "cuda":
        found["driver"] = _nvidia_smi()
        count = torch.cuda.device_count()
        states: list[dict[str, Any]] = []
        watch, watched = _watched(count, found["unknown"])
        # An idle GPU lowers its link to save power, so it is asked while it computes.
        speeds = _gemm_tflops(count, lambda: states.extend(hardware.of_gpu(gpu) for gpu in watched))
        for index in range(count):
            free, total = torch.cuda.mem_get_info(index)
            found["gpus"].append(
                {
                    "name": torch.cuda.get_device_name(index),
                    "memory_gib": round(total / 2**30, 2),
                    "used_by_others_gib": round((total - free) / 2**30, 2),
                    "gemm_tflops": speeds[index],
                    **(states[index] if states else {}),
                }
            )
        found["xids"] = _xids(watch, found["unknown"])
        found["unknown"] += hardware.untold(found["gpus"])
    return found


def _watched(count: int, unknown: list[str]) -> tuple[nvml.XidWatch | None, list[nvml.Gpu]]:
    """NVML's view of the GPUs in CUDA's order, and a watch for their Xid errors."""
    import torch

    gpus: list[nvml.Gpu] = []
    try:
        gpus = [nvml.of_device(torch.device("cuda", index)) for index in range(count)]
        return nvml.XidWatch(gpus), gpus
    except LookupError as error:
        unknown.append(str(error))
        return None, gpus if len(gpus) == count else []


def _xids(watch: nvml.XidWatch | None, unknown: list[str]) -> list[dict[str, Any]]:
    """Xid errors of the kernel's log, and those since the watch began (``hours_ago`` null)."""
    xids = []
    try:
        xids = hardware.logged_xids()
    except LookupError as error:
        unknown.append(f"earlier Xid errors: {error}")
    if watch is not None:
        try:
            xids += [{"bus_id": bus, "xid": xid, "hours_ago": None} for bus, xid in watch.seen()]
        except LookupError as error:
            unknown.append(str(error))
    return xids


def _nvidia_smi() -> list[dict[str, str]] | None:
    """The driver's account of each GPU; None where there is no nvidia-smi to ask."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(  # noqa: S603 - constant words
        ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"],  # noqa: S607
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        return [{"error": " ".join((done.stderr or done.stdout).split())[:300]}]
    return [dict(zip(_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in done.stdout.splitlines()]


def _gemm_tflops(count: int, meanwhile: Callable[[], None], size: int = 8192, repeats: int = 20) -> list[float]:
    """bf16 TFLOP/s of every GPU with all of them at work: one that is throttled or damaged falls behind.

    ``meanwhile`` is called once, while they compute.
    """
    import torch

    operands, events = [], []
    for index in range(count):
        with torch.cuda.device(index):
            a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=f"cuda:{index}") for _ in range(2))
            operands.append((a, b))
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
    for timed in (False, True):
        for index, (a, b) in enumerate(operands):
            with torch.cuda.device(index):
                if timed:
                    events[index][0].record()
                for _ in range(repeats):
                    a @ b
                if timed:
                    events[index][1].record()
    meanwhile()
    speeds = []
    for index in range(count):
        torch.cuda.synchronize(index)
        begin, end = events[index]
        speeds.append(round(2 * size**3 * repeats / begin.elapsed_time(end) / 1e9, 1))
    return speeds


def main() -> int:
    """Examine, report, and say what is wrong."""
    expected = options()
    name = node_name()
    began = time.monotonic()
    expected.folder.mkdir(parents=True, exist_ok=True)
    try:
        found = examine_node(expected)
        more, notes = floors.judged(
            floors.of_node(found, expected.floors, link=expected.link, nodes=expected.nodes), expected.floors
        )
        problems = rules.of_node(found, expected) + more
        for note in [*notes, *(f"{name}: not known: {what}" for what in found["unknown"])]:
            print(f"megatron-flux: pre-flight: {note}", flush=True)
        (expected.folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    except Exception as error:  # a GPU that is broken fails in ways of its own; the node must be named all the same
        problems = [f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"]
    for problem in problems:
        print(f"megatron-flux: pre-flight: {problem}", file=sys.stderr)
    if problems:
        (expected.folder / f"{name}.problems").write_text("".join(f"{problem}\n" for problem in problems))
        return 1
    print(f"megatron-flux: pre-flight: {name} is ready ({time.monotonic() - began:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
