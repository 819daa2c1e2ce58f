"""What a profile asks at least of a node's links and hardware, and what falls short of it: one line for each finding.

A line says what was found, what is allowed and what to do. A rule can be waived in a profile, with a reason; what it
finds is then printed and stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator

from megatron_flux.slurm import preflight_hardware as hardware
from megatron_flux.slurm.values import Text

Rule = Literal["node_bandwidth", "network_bandwidth", "peer_access", "pcie", "memory_rows", "xid", "infiniband"]

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


class Floors(BaseModel):
    """The least that is allowed. What a profile does not name has the default of its link (:data:`DEFAULTS`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_gbps: PositiveFloat | None = None
    """GB/s of bus bandwidth, as NCCL's tests count it, of an all_reduce and an all_gather among a node's GPUs."""
    network_gbps: PositiveFloat | None = None
    """The same among the GPUs of two neighbouring nodes, while all other pairs of nodes do the same."""
    peer_access: bool = False
    """Every pair of a node's GPUs has it. With ``link: nvlink`` it is asked for anyway."""
    pcie_width: PositiveInt | None = None
    """Lanes of each GPU, beside what GPU and slot can do."""
    pcie_generation: PositiveInt | None = None
    infiniband_ports: int = Field(0, ge=0)
    """Active ports of a node, where a job has several nodes."""
    infiniband_rate: PositiveFloat | None = None
    """Gb/s that a port must have to count."""
    xid_hours: PositiveFloat = 24.0
    """So long an Xid error of the hardware in the kernel's log counts."""
    waived: dict[Rule, Text] = {}
    """Rules that stop nothing, and why."""

    @field_validator("*", mode="before")
    @classmethod
    def _not_without_a_reason(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("null is not allowed; to do without, name the rule under `waived` with a reason")
        return value


DEFAULTS = {
    # A tenth to a fifth of one direction's public rate: what falls below goes another way altogether.
    "nvlink": Floors(node_gbps=60, network_gbps=5),  # third generation: 300 GB/s
    "pcie": Floors(node_gbps=3, network_gbps=2),  # generation 4 with 16 lanes: 32 GB/s
    "none": Floors(),
}
"""By a profile's ``link``, for profiles that name no numbers of their own."""


@dataclass(frozen=True)
class Finding:
    """Something that falls short."""

    rule: Rule
    line: str


def judged(findings: Sequence[Finding], floors: Floors) -> tuple[list[str], list[str]]:
    """``(problems, notes)``: notes are findings of waived rules, with the reason."""
    problems, notes = [], []
    for finding in findings:
        reason = floors.waived.get(finding.rule)
        if reason is None:
            problems.append(f"{finding.line} (rule {finding.rule})")
        else:
            notes.append(f"{finding.line} (rule {finding.rule} is waived: {reason})")
    return problems, notes


def of_node(found: Mapping[str, Any], floors: Floors, *, link: str, nodes: int) -> list[Finding]:
    """What falls short on one node.

    Args:
        found: the node's report.
        floors: the profile's.
        link: the profile's.
        nodes: of the job; one alone needs no network.
    """
    node = found["node"]
    findings = [Finding("peer_access", line) for line in _peer_access(node, found["doctor"]["link"], floors, link)]
    for index, gpu in enumerate(found["gpus"]):
        findings += [Finding("pcie", f"{node}: GPU {index}{line}") for line in _pcie(gpu.get("pcie") or {}, floors)]
        findings += [Finding("memory_rows", f"{node}: GPU {index}{line}") for line in _rows(gpu.get("rows") or {})]
    findings += [Finding("xid", f"{node}: {line}") for line in _xids(found, floors)]
    if nodes > 1:
        findings += [Finding("infiniband", f"{node}: {line}") for line in _infiniband(found["infiniband"], floors)]
    return findings


def _peer_access(node: str, seen: Mapping[str, Any], floors: Floors, link: str) -> list[str]:
    # On NVLink the link's kind is refused, with what is missing.
    if link == "nvlink" or not floors.peer_access or seen["peer_access"] == seen["pairs"]:
        return []
    return [
        f"{node}: {seen['peer_access']} of {seen['pairs']} pairs of GPUs have peer access, the profile asks for all; "
        "look at `nvidia-smi topo -p2p r` and at the node's settings of IOMMU and ACS"
    ]


def _pcie(pcie: Mapping[str, int | None], floors: Floors) -> list[str]:
    lines = []
    for what, unit, floor in (("width", "lanes", floors.pcie_width), ("generation", "", floors.pcie_generation)):
        now, most = pcie.get(what), pcie.get(f"max_{what}")
        if now is None:
            continue
        has = f" has {now} PCIe {unit}" if unit else f" runs at PCIe generation {now}"
        todo = "; look at `nvidia-smi -q -d PCIE`, the slot, the riser and the BIOS"
        if most is not None and now < most:
            lines.append(f"{has}, GPU and slot can do {most}{todo}")
        elif floor is not None and now < floor:
            lines.append(f"{has}, the profile's floor is {floor}{todo}")
    return lines


def _rows(rows: Mapping[str, bool]) -> list[str]:
    lines = []
    if rows.get("failed"):
        lines.append(" could not remap a bad row of its memory, none is allowed; have the GPU replaced")
    if rows.get("pending"):
        lines.append(" has memory rows that wait to be remapped, none is allowed; reset the GPU or restart the node")
    return lines


def _xids(found: Mapping[str, Any], floors: Floors) -> list[str]:
    buses = [gpu.get("bus_id") or "" for gpu in found["gpus"]]
    seen: dict[tuple[str, int], str] = {}
    for event in found.get("xids", ()):
        index = hardware.same_place(buses, event["bus_id"])
        hours = event["hours_ago"]
        logged = hours is not None
        # What happens now counts whatever it is; old news of GPUs that are not this job's does not.
        if logged and (event["xid"] not in HARDWARE_XIDS or hours > floors.xid_hours or (index is None and any(buses))):
            continue
        what = HARDWARE_XIDS.get(event["xid"], "see NVIDIA's list of Xid errors")
        who = f"GPU at {event['bus_id']}" if index is None else f"GPU {index}"
        when = f"{hours:.1f} h ago, none is allowed for {floors.xid_hours:g} h" if logged else "during the pre-flight"
        # The latest of the same error: the log is in order.
        seen[who, event["xid"]] = (
            f"{who} reported Xid {event['xid']} ({what}) {when}; reset the GPU or have the node looked at"
        )
    return list(seen.values())


def _infiniband(ports: Sequence[Mapping[str, Any]], floors: Floors) -> list[str]:
    lines = []
    for port in ports:
        # A port without a cable is nobody's fault, one with a link that carries nothing is.
        if port["state"] != "ACTIVE" and (port["asked_for"] or port["physical"] == "LinkUp"):
            why = "NCCL_IB_HCA names it" if port["asked_for"] else "its cable is connected"
            lines.append(
                f"InfiniBand port {port['name']} is {port['state'] or 'in no known state'} "
                f"({port['physical'] or 'unknown link'}), ACTIVE is allowed because {why}; "
                "look at `ibstat`, the cable and the subnet manager"
            )
    rate = floors.infiniband_rate or 0.0
    active = [port for port in ports if port["state"] == "ACTIVE" and port["rate"] >= rate]
    if len(active) < floors.infiniband_ports:
        others = ", ".join(
            f"{port['name']} {port['state']} at {port['rate']:g} Gb/s" for port in ports if port not in active
        )
        at = f" at {rate:g} Gb/s or more" if rate else ""
        lines.append(
            f"{len(active)} InfiniBand port(s) active{at}, the profile's floor is {floors.infiniband_ports}; "
            f"the others: {others or 'none'}; look at `ibstat`, the cables and, in a container, at /sys and NCCL_IB_HCA"
        )
    return lines


def within_nodes(gbps: Mapping[str, Mapping[str, float]], floors: Floors) -> list[Finding]:
    """Nodes whose GPUs are too slow among themselves; ``gbps``: by collective and node."""
    floor = floors.node_gbps
    if floor is None:
        return []
    return [
        Finding(
            "node_bandwidth",
            f"{node}: {what} among its GPUs reaches {value:.2f} GB/s (bus), the profile's floor is {floor:g}; look "
            "at `nvidia-smi nvlink -s`, `nvidia-smi topo -m`, the fabric manager, NCCL_P2P_DISABLE and NCCL_DEBUG=INFO",
        )
        for what, by_node in gbps.items()
        for node, value in by_node.items()
        if value < floor
    ]


_NETWORK = (
    "NCCL may have fallen back to TCP: run with NCCL_DEBUG=INFO and look for NET/Socket, at NCCL_IB_HCA, "
    "NCCL_IB_DISABLE and NCCL_SOCKET_IFNAME, `ibstat`, and whether libibverbs is where the job runs"
)


def between_nodes(gbps: Mapping[str, Mapping[tuple[str, str], float]], floors: Floors) -> list[Finding]:
    """Pairs of nodes that are too slow; ``gbps``: by collective and pair.

    Where all pairs are too slow no node is to blame, and one line says it. Else a node is named alone if it is too slow
    with both of its neighbours.
    """
    floor = floors.network_gbps
    if floor is None:
        return []
    findings = []
    for what, by_pair in gbps.items():
        slow = {pair: value for pair, value in by_pair.items() if value < floor}
        tail = f"GB/s (bus) in {what}, the profile's floor is {floor:g}; {_NETWORK}"
        if len(slow) == len(by_pair) > 1:
            least, most = min(slow.values()), max(slow.values())
            lines = [f"all {len(slow)} pairs of nodes: {least:.2f} to {most:.2f} {tail}"]
        else:
            lines = [f"{who}: {value:.2f} {tail}" for who, value in _blamed(by_pair, slow)]
        findings += [Finding("network_bandwidth", line) for line in lines]
    return findings


def _blamed(by_pair: Mapping[tuple[str, str], float], slow: Mapping[tuple[str, str], float]) -> list[tuple[str, float]]:
    """Who is too slow, and how slow: nodes first, then pairs without such a node."""
    bad = {
        node: max(slow[pair] for pair in pairs)
        for node in dict.fromkeys(node for pair in slow for node in pair)
        if len(pairs := [pair for pair in by_pair if node in pair]) > 1 and all(pair in slow for pair in pairs)
    }
    alone = [(f"{node} with each neighbour", value) for node, value in bad.items()]
    return alone + [(f"{a} with {b}", value) for (a, b), value in slow.items() if a not in bad and b not in bad]
