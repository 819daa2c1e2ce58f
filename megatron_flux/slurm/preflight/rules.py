"""Pre-flight rules: problems of nodes and links, decided from reports alone, one line each.

A line says what was found, what is allowed and what to do.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_flux.comm.host_schedule import default_layout
from megatron_flux.comm.shared_memory import FOLDER
from megatron_flux.options import Checked, validated
from megatron_flux.settings import LinkKind
from megatron_flux.slurm.profile import DEFAULTS, Floors

_OTHERS_GIB = 2.0  # device memory that drivers, displays and this process itself may hold on an empty GPU
_NETWORK = (
    "NCCL may have fallen back to TCP: run with NCCL_DEBUG=INFO and look for NET/Socket, at NCCL_IB_HCA, "
    "NCCL_IB_DISABLE and NCCL_SOCKET_IFNAME, `ibstat`, and whether libibverbs is where the job runs"
)


class Expected(Checked):
    """Requirements of a job's script: options of ``preflight.node`` and ``preflight.ranks``."""

    folder: Path  # where reports and problems go
    device: Literal["cuda", "cpu"]
    processes: int  # and with cuda GPUs, of a node
    link: LinkKind  # that the job uses
    host_tp: int = 0  # ranks of a group that may send through host memory; 0: none does
    gpu_name: str | None = None  # words of the GPUs' name
    gpu_memory_gib: int | None = None
    needs_numactl: bool = False
    slow_fraction: float = 0.8  # the least part of the median that is not slow
    timeout: float = 600.0  # seconds
    floors: Floors = DEFAULTS["none"]  # as JSON on a command line

    @property
    def shared_memory(self) -> int:
        """Bytes that a node's groups need in ``/dev/shm`` (:mod:`megatron_flux.comm.shared_memory`)."""
        if self.link != "host" or not self.host_tp:  # over p2p a job can do without
            return 0
        return self.processes // self.host_tp * default_layout(self.host_tp).total_bytes

    @classmethod
    def given(cls) -> Expected:
        """Read this process's command line of ``--name=value`` and ``--name``, as a job's script writes it."""
        words = (word.removeprefix("--").partition("=") for word in sys.argv[1:])
        values: dict[str, Any] = {name.replace("-", "_"): value if is_set else True for name, is_set, value in words}
        return validated(cls, "pre-flight", values | {"floors": json.loads(values.get("floors", "{}"))})


def node_problems(report: Mapping[str, Any], expected: Expected) -> list[str]:
    """List what keeps the node of ``report`` from running the job."""
    problems = list(report["doctor"]["problems"])
    if expected.needs_numactl and not report["numactl"]:
        problems.append("numactl is not installed; set numa_binding: null in the profile to do without")
    total, free = (nbytes >> 20 for nbytes in report["shared_memory"])
    if (needed := expected.shared_memory >> 20) > free:
        problems.append(
            f"{FOLDER} has {free} MiB left of {total}, the link through host memory needs {needed} MiB; look for files "
            "that others left there, and give a container more (--shm-size, or the host's as a mount)"
        )
    if expected.device == "cuda":
        problems += _gpu_problems(report, expected)
    return [f"{report['node']}: {problem}" for problem in problems]


def _gpu_problems(report: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    link, gpus = report["doctor"]["link"], report["gpus"]
    if len(gpus) != expected.processes:
        yield f"{len(gpus)} GPU(s), the profile says {expected.processes}"
    # Whole words: an RTX A1000 is no A100.
    words = expected.gpu_name and rf"(?<!\w){re.escape(expected.gpu_name)}(?!\w)"
    for index, gpu in enumerate(gpus):
        if words and not re.search(words, gpu["name"], re.IGNORECASE):
            yield f"GPU {index} is {gpu['name']}, the profile says {expected.gpu_name}"
        # A driver shows some per cent less than the number on the box.
        if expected.gpu_memory_gib and gpu["memory_gib"] < 0.9 * expected.gpu_memory_gib:
            yield f"GPU {index} has {gpu['memory_gib']} GiB, the profile says {expected.gpu_memory_gib}"
        if gpu["used_by_others_gib"] > _OTHERS_GIB:
            yield f"{gpu['used_by_others_gib']} GiB of GPU {index} are in use by another process"
    for index, row in enumerate(report["driver"]):
        if "error" in row:
            yield f"the driver does not answer: {row['error']}"
        if row.get("slowed"):
            yield f"GPU {index} is slowed down by its hardware (heat or power)"
        if errors := row.get("uncorrected"):
            yield f"GPU {index} has {errors:g} uncorrected memory error(s)"
    if expected.link == "nvlink":
        if link["kind"] != "nvlink" and len(gpus) > 1:
            yield f"the GPUs' link is {link['kind']} ({link['reason']}), the profile says nvlink"
    elif expected.floors.peer_access and link["peer_access"] != link["pairs"]:
        yield (
            f"{link['peer_access']} of {link['pairs']} pairs of GPUs have peer access, the profile asks for all; "
            "look at `nvidia-smi topo -p2p r` and at the node's settings of IOMMU and ACS, or use link host"
        )
    yield from slow({f"GPU {i}": gpu["gemm_tflops"] for i, gpu in enumerate(gpus)}, "TFLOP/s", expected)


def slow(values: Mapping[str, float], unit: str, expected: Expected) -> list[str]:
    """List the names that reach less than the allowed part of the median."""
    median = statistics.median(values.values()) if values else 0.0
    below = {name: value for name, value in values.items() if value < expected.slow_fraction * median}
    return [f"{name} reaches {value:.1f} {unit}, the median is {median:.1f}" for name, value in below.items()]


def differences(reports: Sequence[Mapping[str, Any]], expected: Expected) -> list[str]:
    """List differences between nodes that must be alike; names the nodes of the minority."""
    doctors = [report["doctor"] for report in reports]
    names = sorted({name for doctor in doctors for name in doctor["versions"]})
    alike = {name: [doctor["versions"].get(name) or "none" for doctor in doctors] for name in names}
    alike["device"] = [", ".join(dict.fromkeys(doctor["devices"])) for doctor in doctors]
    alike["link"] = [doctor["link"]["kind"] for doctor in doctors]
    problems = []
    for what, values in alike.items():
        usual, often = Counter(values).most_common(1)[0]
        problems += [
            f"{report['node']}: {what} is {value}, {often} of {len(values)} nodes have {usual}"
            for report, value in zip(reports, values, strict=True)
            if value != usual
        ]
    if expected.device == "cuda":
        speeds = {r["node"]: statistics.median(gpu["gemm_tflops"] for gpu in r["gpus"]) for r in reports if r["gpus"]}
        problems += slow(speeds, "TFLOP/s per GPU", expected)
    return problems


def within_nodes(gbps: Mapping[str, float], floors: Floors) -> list[str]:
    """List nodes whose GPUs are too slow among themselves; ``gbps``: of an all_reduce, by node."""
    floor = floors.node_gbps or 0.0
    look = "`nvidia-smi nvlink -s`, `nvidia-smi topo -m`, the fabric manager, NCCL_P2P_DISABLE and NCCL_DEBUG=INFO"
    return [
        f"{node}: an all_reduce among its GPUs reaches {value:.2f} GB/s (bus), the profile's floor is {floor:g}; "
        f"look at {look}"
        for node, value in gbps.items()
        if value < floor
    ]


def between_nodes(gbps: Mapping[tuple[str, str], float], floors: Floors) -> list[str]:
    """List pairs of nodes that are too slow, by ``gbps`` of an all_reduce; one line where all are.

    A node that is too slow with both neighbours is named by itself, before the pairs without such a node.
    """
    floor = floors.network_gbps or 0.0
    below = {pair: value for pair, value in gbps.items() if value < floor}
    if len(below) == len(gbps) > 1:
        lines = [f"all {len(below)} pairs of nodes: {min(below.values()):.2f} to {max(below.values()):.2f}"]
    else:
        bad = {}
        for node in dict.fromkeys(node for pair in below for node in pair):
            pairs = [pair for pair in gbps if node in pair]
            if len(pairs) > 1 and all(pair in below for pair in pairs):
                bad[node] = max(below[pair] for pair in pairs)
        lines = [f"{node} with each neighbour: {value:.2f}" for node, value in bad.items()]
        lines += [f"{a} with {b}: {v:.2f}" for (a, b), v in below.items() if a not in bad and b not in bad]
    return [f"{line} GB/s (bus) in an all_reduce, the profile's floor is {floor:g}; {_NETWORK}" for line in lines]
