"""What falls short of what a profile asks of nodes and links: decided from reports alone, one line a problem.

A line says what was found, what is allowed and what to do. A :data:`~megatron_flux.slurm.profile.Rule` can be waived in
a profile, with a reason: what it finds is then printed and stops nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_flux.comm.host_memory import FOLDER
from megatron_flux.comm.host_schedule import Layout
from megatron_flux.errors import UserError
from megatron_flux.kernels.wire_format import FP8_CAPABILITY
from megatron_flux.slurm.profile import DEFAULTS, Checked, Floors, LinkKind, Rule, validated

Finding = tuple[Rule, str]  # a line about something that falls short, by a rule that can be waived

HARDWARE_XIDS = {
    48: "uncorrectable memory error",
    54: "auxiliary power is not connected",
    62: "internal micro-controller halted",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit memory errors",
    95: "uncontained memory error",
    119: "no answer from the GPU's system processor",
    120: "error in the GPU's system processor",
    140: "unrecovered memory error",
}
"""Of the kernel's log, these speak of the machine; others (such as 13, 31, 43) mostly of a program that ran there."""

_CLOCK_S = 1.0  # seconds between two nodes' clocks; NTP keeps them within milliseconds
_OTHERS_GIB = 2.0  # device memory that drivers, displays and this process itself may hold on an empty GPU
_NETWORK = (
    "NCCL may have fallen back to TCP: run with NCCL_DEBUG=INFO and look for NET/Socket, at NCCL_IB_HCA, "
    "NCCL_IB_DISABLE and NCCL_SOCKET_IFNAME, `ibstat`, and whether libibverbs is where the job runs"
)


class Expected(Checked):
    """What a job's script expects of every node: options of ``preflight.node`` and ``preflight.ranks``."""

    folder: Path  # where reports and problems go
    device: Literal["cuda", "cpu"]
    processes: int  # and with cuda GPUs, of a node
    link: LinkKind  # that the job uses
    needs_fp8: bool = False
    host_tp: int = 0  # ranks of a group that sends through host memory; 0: none does
    gpu_name: str | None = None  # words of the GPUs' name
    gpu_memory_gib: int | None = None
    needs_numactl: bool = False
    slow_fraction: float = 0.8  # the least part of the median that is not slow
    timeout: float = 600.0  # seconds
    nodes: int = 1
    floors: Floors = DEFAULTS["none"]  # as JSON on a command line

    @property
    def shared_memory(self) -> int:
        """Bytes that a node's groups need in ``/dev/shm`` (:mod:`megatron_flux.comm.host_memory`)."""
        return self.processes // self.host_tp * Layout(self.host_tp).total_bytes if self.host_tp else 0

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> Expected:
        """From the words of a command line; default: of this process's."""
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
        for name, field in cls.model_fields.items():
            option = {"action": "store_true"} if field.annotation is bool else {"required": field.is_required()}
            parser.add_argument(f"--{name.replace('_', '-')}", **option)
        given = vars(parser.parse_args(words))
        try:
            return validated(cls, "pre-flight", {**given, "floors": json.loads(given.get("floors", "{}"))})
        except (UserError, ValueError) as error:
            parser.error(str(error))


def judge(findings: Sequence[Finding], floors: Floors) -> tuple[list[str], list[str]]:
    """``(problems, notes)``: notes are findings of waived rules, with the reason."""
    waived = floors.waived
    problems = [f"{line} (rule {rule})" for rule, line in findings if rule not in waived]
    return problems, [f"{line} (rule {rule} is waived: {waived[rule]})" for rule, line in findings if rule in waived]


def node_problems(found: Mapping[str, Any], expected: Expected) -> list[str]:
    """What keeps the node of the report ``found`` from running the job, whatever is waived."""
    link, gpus = found["doctor"]["link"], found["gpus"]
    problems = list(found["doctor"]["problems"])
    if expected.needs_numactl and not found["numactl"]:
        problems.append("numactl is not installed; set numa_binding: null in the profile to do without")
    if expected.device == "cuda":
        if len(gpus) != expected.processes:
            problems.append(f"{len(gpus)} GPU(s), the profile says {expected.processes}")
        for index, gpu in enumerate(gpus):
            # Whole words: an RTX A1000 is no A100.
            words = expected.gpu_name and rf"(?<!\w){re.escape(expected.gpu_name)}(?!\w)"
            if words and not re.search(words, gpu["name"], re.IGNORECASE):
                problems.append(f"GPU {index} is {gpu['name']}, the profile says {expected.gpu_name}")
            # A driver shows some per cent less than the number on the box.
            if expected.gpu_memory_gib and gpu["memory_gib"] < 0.9 * expected.gpu_memory_gib:
                problems.append(f"GPU {index} has {gpu['memory_gib']} GiB, the profile says {expected.gpu_memory_gib}")
            if expected.needs_fp8 and tuple(gpu["capability"]) < FP8_CAPABILITY:
                least, has = (".".join(map(str, of)) for of in (FP8_CAPABILITY, gpu["capability"]))
                problems.append(f"wire fp8 needs compute capability {least}, GPU {index} has {has}; use wire int8")
            if gpu["used_by_others_gib"] > _OTHERS_GIB:
                problems.append(f"{gpu['used_by_others_gib']} GiB of GPU {index} are in use by another process")
        for index, row in enumerate(found["driver"]):
            if "error" in row:
                problems.append(f"the driver does not answer: {row['error']}")
            if row.get("slowed"):
                problems.append(f"GPU {index} is slowed down by its hardware (heat or power)")
            if errors := row.get("uncorrected"):
                problems.append(f"GPU {index} has {errors:g} uncorrected memory error(s)")
        if expected.link == "nvlink" and link["kind"] != "nvlink" and len(gpus) > 1:
            problems.append(f"the GPUs' link is {link['kind']} ({link['reason']}), the profile says nvlink")
        problems += slow({f"GPU {i}": gpu["gemm_tflops"] for i, gpu in enumerate(gpus)}, "TFLOP/s", expected)
    return [f"{found['node']}: {problem}" for problem in problems]


def slow(values: Mapping[str, float], unit: str, expected: Expected) -> list[str]:
    """Whoever reaches less than the allowed part of the median."""
    median = statistics.median(values.values()) if values else 0.0
    below = {name: value for name, value in values.items() if value < expected.slow_fraction * median}
    return [f"{name} reaches {value:.1f} {unit}, the median is {median:.1f}" for name, value in below.items()]


def node_findings(found: Mapping[str, Any], expected: Expected) -> list[Finding]:
    """What falls short of the floors on the node of the report ``found``."""
    floors, seen = expected.floors, found["doctor"]["link"]
    findings: list[Finding] = []
    # On NVLink the link's kind is refused, with what is missing.
    if expected.link != "nvlink" and floors.peer_access and seen["peer_access"] != seen["pairs"]:
        line = (
            f"{seen['peer_access']} of {seen['pairs']} pairs of GPUs have peer access, the profile asks for all; "
            "look at `nvidia-smi topo -p2p r` and at the node's settings of IOMMU and ACS, or use link host"
        )
        findings.append(("peer_access", line))
    total, free = (nbytes >> 20 for nbytes in found["shared_memory"])
    if (needed := expected.shared_memory >> 20) > free:
        line = (
            f"{FOLDER} has {free} MiB left of {total}, the link through host memory needs {needed} MiB; look for files "
            "that others left there, and give a container more (--shm-size, or the host's as a mount)"
        )
        findings.append(("shared_memory", line))
    for index, gpu in enumerate(found["gpus"]):
        findings += [("pcie", f"GPU {index} {line}") for line in _pcie(gpu.get("pcie") or {}, floors)]
        rows = gpu.get("rows") or {}
        for state, line in (
            ("failed", "could not remap a bad row of its memory, none is allowed; have the GPU replaced"),
            ("pending", "has memory rows that wait to be remapped, none is allowed; reset the GPU or restart the node"),
        ):
            if rows.get(state):
                findings.append(("memory_rows", f"GPU {index} {line}"))
    findings += [("xid", line) for line in _xids(found, floors)]
    if expected.nodes > 1:  # one alone needs no network
        findings += [("infiniband", line) for line in _infiniband(found["infiniband"], floors)]
    return [(rule, f"{found['node']}: {line}") for rule, line in findings]


def _pcie(pcie: Mapping[str, int | None], floors: Floors) -> Iterator[str]:
    for what, has, floor in (
        ("width", "has {} PCIe lanes", floors.pcie_width),
        ("generation", "runs at PCIe generation {}", floors.pcie_generation),
    ):
        now, most = pcie.get(what), pcie.get(f"max_{what}")
        if now is None or now >= max(most or 0, floor or 0):
            continue
        allowed = f"GPU and slot can do {most}" if now < (most or 0) else f"the profile's floor is {floor}"
        yield f"{has.format(now)}, {allowed}; look at `nvidia-smi -q -d PCIE`, the slot, the riser and the BIOS"


def _xids(found: Mapping[str, Any], floors: Floors) -> Iterable[str]:
    places = [_place(gpu.get("bus_id") or "") for gpu in found["gpus"]]
    latest: dict[tuple[str, int], str] = {}  # of the same error: the log is in order
    for event in found.get("xids", ()):
        place, xid, hours = _place(event["bus_id"]), event["xid"], event["hours_ago"]
        index = places.index(place) if place and place in places else None
        when = "during the pre-flight"
        # What happens now counts whatever it is; old news of GPUs that are not this job's does not.
        if hours is not None:
            if xid not in HARDWARE_XIDS or hours > floors.xid_hours or (index is None and any(places)):
                continue
            when = f"{hours:.1f} h ago, none is allowed for {floors.xid_hours:g} h"
        what = HARDWARE_XIDS.get(xid, "see NVIDIA's list of Xid errors")
        who = f"GPU at {event['bus_id']}" if index is None else f"GPU {index}"
        latest[who, xid] = f"{who} reported Xid {xid} ({what}) {when}; reset the GPU or have the node looked at"
    return latest.values()


def _place(bus_id: str) -> list[int]:
    """Domain, bus and device: the kernel and NVML write the same place differently."""
    found = re.match(r"([0-9A-Fa-f]+):([0-9A-Fa-f]+):([0-9A-Fa-f]+)", bus_id)
    return [int(part, 16) for part in found.groups()] if found else []


def _infiniband(ports: Sequence[Mapping[str, Any]], floors: Floors) -> Iterator[str]:
    for port in ports:
        # A port without a cable is no fault, one with a link that carries nothing is.
        if port["state"] != "ACTIVE" and (port["asked_for"] or port["physical"] == "LinkUp"):
            why = "NCCL_IB_HCA names it" if port["asked_for"] else "its cable is connected"
            yield (
                f"InfiniBand port {port['name']} is {port['state'] or 'in no known state'} "
                f"({port['physical'] or 'unknown link'}), ACTIVE is allowed because {why}; "
                "look at `ibstat`, the cable and the subnet manager"
            )
    rate = floors.infiniband_rate or 0.0
    others = [port for port in ports if port["state"] != "ACTIVE" or port["rate"] < rate]
    if (active := len(ports) - len(others)) < floors.infiniband_ports:
        listed = ", ".join(f"{port['name']} {port['state']} at {port['rate']:g} Gb/s" for port in others) or "none"
        at = f" at {rate:g} Gb/s or more" if rate else ""
        yield (
            f"{active} InfiniBand port(s) active{at}, the profile's floor is {floors.infiniband_ports}; the others: "
            f"{listed}; look at `ibstat`, the cables and, in a container, at /sys and NCCL_IB_HCA"
        )


def differences(reports: Sequence[Mapping[str, Any]], expected: Expected) -> list[str]:
    """Where nodes differ that must be alike; those of the minority are named."""

    def ports(report: Mapping[str, Any]) -> str:
        rates = Counter(port["rate"] for port in report["infiniband"] if port["state"] == "ACTIVE")
        return ", ".join(f"{count} at {rate:g}" for rate, count in sorted(rates.items())) or "0"

    doctors = [report["doctor"] for report in reports]
    clocks = [{row.get("max_sm_mhz") for row in report.get("driver", ())} - {None} for report in reports]
    names = sorted({name for doctor in doctors for name in doctor["versions"]})
    alike = {name: [doctor["versions"].get(name) or "none" for doctor in doctors] for name in names}
    alike["device"] = [", ".join(dict.fromkeys(doctor["devices"])) for doctor in doctors]
    alike["link"] = [doctor["link"]["kind"] for doctor in doctors]
    if "infiniband" not in expected.floors.waived:
        alike["active InfiniBand ports and their Gb/s"] = list(map(ports, reports))
    alike["highest SM clock (MHz)"] = [
        ", ".join(f"{clock:g}" for clock in sorted(found)) or "unknown" for found in clocks
    ]
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


def clocks(met: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Nodes whose clocks are off; ``met``: by node, its Unix times before and after a moment that all nodes share.

    Two clocks differ at least by the gap between their times. The one in the middle is held to be right.
    """
    middle = sorted(met, key=lambda node: sum(met[node]))[(len(met) - 1) // 2]
    begin, end = met[middle]
    findings: list[Finding] = []
    for node, (before, after) in met.items():
        if (gap := max(before - end, begin - after)) > _CLOCK_S:
            way = "ahead of" if before > end else "behind"
            line = f"{node}: its clock is {gap:.1f} s {way} that of {middle}, {_CLOCK_S:g} s is allowed"
            findings.append(("clock", f"{line}; look at `chronyc tracking` or `timedatectl`"))
    return findings


def within_nodes(gbps: Mapping[str, Mapping[str, float]], floors: Floors) -> list[Finding]:
    """Nodes whose GPUs are too slow among themselves; ``gbps``: by collective and node."""
    floor = floors.node_gbps or 0.0
    look = "`nvidia-smi nvlink -s`, `nvidia-smi topo -m`, the fabric manager, NCCL_P2P_DISABLE and NCCL_DEBUG=INFO"
    findings: list[Finding] = []
    for what, by_node in gbps.items():
        for node, value in by_node.items():
            if value < floor:
                line = f"{node}: {what} among its GPUs reaches {value:.2f} GB/s (bus), the profile's floor is {floor:g}"
                findings.append(("node_bandwidth", f"{line}; look at {look}"))
    return findings


def between_nodes(gbps: Mapping[str, Mapping[tuple[str, str], float]], floors: Floors) -> list[Finding]:
    """Pairs of nodes that are too slow; ``gbps``: by collective and pair. One line where all are: no node is to blame.

    Else a node is named by itself if it is too slow with both neighbours, before the pairs without such a node.
    """
    floor = floors.network_gbps or 0.0
    findings: list[Finding] = []
    for what, by_pair in gbps.items():
        below = {pair: value for pair, value in by_pair.items() if value < floor}
        if len(below) == len(by_pair) > 1:
            lines = [f"all {len(below)} pairs of nodes: {min(below.values()):.2f} to {max(below.values()):.2f}"]
        else:
            bad = {}
            for node in dict.fromkeys(node for pair in below for node in pair):
                pairs = [pair for pair in by_pair if node in pair]
                if len(pairs) > 1 and all(pair in below for pair in pairs):
                    bad[node] = max(below[pair] for pair in pairs)
            lines = [f"{node} with each neighbour: {value:.2f}" for node, value in bad.items()]
            lines += [f"{a} with {b}: {v:.2f}" for (a, b), v in below.items() if a not in bad and b not in bad]
        tail = f"GB/s (bus) in {what}, the profile's floor is {floor:g}; {_NETWORK}"
        findings += [("network_bandwidth", f"{line} {tail}") for line in lines]
    return findings
