"""What is wrong with a node, and with a node among others: decided from reports alone, one line for each problem."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_flux.slurm.preflight_floors import Floors

_OTHERS_GIB = 2.0
"""Device memory that drivers, displays and this process itself may hold on an empty GPU."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a profile says of every node."""

    folder: Path
    device: str
    processes: int
    link: str
    gpu_name: str | None = None
    gpu_memory_gib: int | None = None
    needs_numactl: bool = False
    slow_fraction: float = 0.8
    timeout: float = 600.0
    floors: Floors = field(default_factory=Floors)
    nodes: int = 1
    """Of the job."""


def of_node(found: Mapping[str, Any], expected: Expected) -> list[str]:
    """What keeps this node from running the job."""
    node, doctor = found["node"], found["doctor"]
    problems = [f"{node}: {problem}" for problem in doctor["problems"]]
    if expected.needs_numactl and not found["numactl"]:
        problems.append(f"{node}: numactl is not installed; set numa_binding: null in the profile to do without")
    if expected.device != "cuda":
        return problems
    gpus = found["gpus"]
    if len(gpus) != expected.processes:
        problems.append(f"{node}: {len(gpus)} GPU(s), the profile says {expected.processes}")
    problems += _of_gpus(node, gpus, expected)
    problems += _of_driver(node, found.get("driver"))
    link = doctor["link"]
    if expected.link == "nvlink" and link["kind"] != "nvlink" and len(gpus) > 1:
        problems.append(f"{node}: the GPUs' link is {link['kind']} ({link['reason']}), the profile says nvlink")
    problems += slow({f"GPU {i}": gpu["gemm_tflops"] for i, gpu in enumerate(gpus)}, "TFLOP/s", expected, f"{node}: ")
    return problems


def _of_gpus(node: str, gpus: Sequence[Mapping[str, Any]], expected: Expected) -> list[str]:
    problems = []
    for index, gpu in enumerate(gpus):
        if expected.gpu_name and expected.gpu_name.lower() not in gpu["name"].lower():
            problems.append(f"{node}: GPU {index} is {gpu['name']}, the profile says {expected.gpu_name}")
        # A driver shows some per cent less than the number on the box.
        if expected.gpu_memory_gib and gpu["memory_gib"] < 0.9 * expected.gpu_memory_gib:
            problems.append(
                f"{node}: GPU {index} has {gpu['memory_gib']} GiB, the profile says {expected.gpu_memory_gib}"
            )
        if gpu["used_by_others_gib"] > _OTHERS_GIB:
            problems.append(f"{node}: {gpu['used_by_others_gib']} GiB of GPU {index} are in use by another process")
    return problems


def _of_driver(node: str, rows: Sequence[Mapping[str, str]] | None) -> list[str]:
    problems = []
    for row in rows or ():
        if "error" in row:
            problems.append(f"{node}: nvidia-smi: {row['error']}")
            continue
        if row.get("clocks_throttle_reasons.hw_slowdown") == "Active":
            problems.append(f"{node}: GPU {row['index']} is slowed down by its hardware (heat or power)")
        errors = row.get("ecc.errors.uncorrected.volatile.total", "")
        if errors.isdigit() and int(errors) > 0:
            problems.append(f"{node}: GPU {row['index']} has {errors} uncorrected memory error(s)")
    return problems


def slow(values: Mapping[str, float], unit: str, expected: Expected, where: str = "") -> list[str]:
    """Whoever reaches less than the allowed part of the median."""
    if len(values) < 2:
        return []
    median = statistics.median(values.values())
    return [
        f"{where}{name} reaches {value:.1f} {unit}, the median is {median:.1f}"
        for name, value in values.items()
        if value < expected.slow_fraction * median
    ]


def of_nodes(reports: Sequence[Mapping[str, Any]], expected: Expected) -> list[str]:
    """Where nodes differ that must be alike; those of the minority are named."""
    problems = []
    for what in sorted({name for report in reports for name in report["doctor"]["versions"]}):
        values = {report["node"]: report["doctor"]["versions"].get(what) or "none" for report in reports}
        problems += _odd_ones(values, what)
    problems += _odd_ones({r["node"]: ", ".join(dict.fromkeys(r["doctor"]["devices"])) for r in reports}, "device")
    problems += _odd_ones({r["node"]: r["doctor"]["link"]["kind"] for r in reports}, "link")
    if "infiniband" not in expected.floors.waived:
        problems += _odd_ones({r["node"]: _ports(r) for r in reports}, "active InfiniBand ports and their Gb/s")
    clocks = {r["node"]: _highest_clocks(r) for r in reports}
    problems += _odd_ones(clocks, "highest SM clock (MHz)")
    if expected.device == "cuda":
        speeds = {r["node"]: statistics.median(gpu["gemm_tflops"] for gpu in r["gpus"]) for r in reports if r["gpus"]}
        problems += slow(speeds, "TFLOP/s per GPU", expected)
    return problems


def _highest_clocks(report: Mapping[str, Any]) -> str:
    return ", ".join(sorted({row.get("clocks.max.sm", "unknown") for row in report.get("driver") or ()})) or "unknown"


def _ports(report: Mapping[str, Any]) -> str:
    rates = Counter(port["rate"] for port in report["infiniband"] if port["state"] == "ACTIVE")
    return ", ".join(f"{count} at {rate:g}" for rate, count in sorted(rates.items())) or "0"


def _odd_ones(values: Mapping[str, str], what: str) -> list[str]:
    counts = Counter(values.values())
    usual, often = counts.most_common(1)[0]
    return [
        f"{node}: {what} is {value}, {often} of {len(values)} nodes have {usual}"
        for node, value in values.items()
        if value != usual
    ]
