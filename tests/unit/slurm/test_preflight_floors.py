"""Floors: what falls short of a profile's least values is named with the number, what is allowed and what to do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_flux.errors import UserError
from megatron_flux.slurm.preflight import node, rules
from megatron_flux.slurm.preflight.ranks import neighbours, numbers
from megatron_flux.slurm.preflight.rules import between_nodes, judge, within_nodes
from megatron_flux.slurm.profile import Floors, Profile
from tests.unit.slurm.test_preflight import changed, report

FLOORS = Profile.load("nvlink-h100").floors


def lines(found: dict[str, Any], floors: Floors = FLOORS, link: str = "nvlink", nodes: int = 2) -> list[str]:
    return findings(found, floors, link, nodes)[0]


def findings(found: dict[str, Any], floors: Floors, link: str, nodes: int) -> tuple[list[str], list[str]]:
    """Problems and notes."""
    expected = rules.Expected(folder=Path(), device="cuda", processes=8, link=link, floors=floors, nodes=nodes)
    return judge(rules.node_findings(found, expected), floors)


def port(name: str = "mlx5_0:1", **changes: Any) -> dict[str, Any]:
    usual = {"state": "ACTIVE", "physical": "LinkUp", "rate": 400.0, "layer": "InfiniBand", "asked_for": False}
    return {"name": name, **usual, **changes}


def test_a_good_node_passes() -> None:
    assert lines(report()) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("gpus", 3, "pcie", "width"),
            8,
            ["n03: GPU 3 has 8 PCIe lanes, GPU and slot can do 16", "riser", "(rule pcie)"],
        ),
        (("gpus", 3, "pcie", "generation"), 1, ["n03: GPU 3 runs at PCIe generation 1, GPU and slot can do 5"]),
        (
            ("gpus", 3, "pcie"),
            {"width": 8, "max_width": 8, "generation": 5, "max_generation": 5},
            ["n03: GPU 3 has 8 PCIe lanes, the profile's floor is 16"],
        ),
        (("gpus", 3, "rows"), {"pending": True, "failed": False}, ["n03: GPU 3 has memory rows that wait", "reset"]),
        (("gpus", 3, "rows"), {"pending": False, "failed": True}, ["n03: GPU 3 could not remap", "replaced"]),
        (
            ("xids",),
            [{"bus_id": "0000:02:00", "xid": 79, "hours_ago": 1.5}],
            ["n03: GPU 2 reported Xid 79 (GPU has fallen off the bus) 1.5 h ago", "for 24 h", "reset the GPU"],
        ),
        (
            ("xids",),
            [{"bus_id": "00000000:05:00.0", "xid": 31, "hours_ago": None}],
            ["n03: GPU 5 reported Xid 31", "during the pre-flight"],
        ),
        (
            ("infiniband",),
            [port(state="INIT")],
            ["n03: InfiniBand port mlx5_0:1 is INIT (LinkUp), ACTIVE is allowed because its cable is connected"],
        ),
        (
            ("infiniband",),
            [port(), port("mlx5_1:1", state="DOWN", physical="Disabled", asked_for=True)],
            ["n03: InfiniBand port mlx5_1:1 is DOWN (Disabled), ACTIVE is allowed because NCCL_IB_HCA names it"],
        ),
        (
            ("infiniband",),
            [port(rate=100.0)],
            [
                "0 InfiniBand port(s) active at 200 Gb/s or more, the profile's floor is 1",
                "mlx5_0:1 ACTIVE at 100 Gb/s",
            ],
        ),
        (("infiniband",), [], ["0 InfiniBand port(s) active", "the others: none", "ibstat"]),
    ],
)
def test_what_falls_short_on_a_node(path: tuple[Any, ...], value: Any, said: list[str]) -> None:
    found = lines(changed(path, value))
    assert found
    for part in said:
        assert part in found[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        # A program's error, an old one, another job's GPU.
        (("xids",), [{"bus_id": "0000:02:00", "xid": 13, "hours_ago": 1.5}]),
        (("xids",), [{"bus_id": "0000:02:00", "xid": 79, "hours_ago": 25.0}]),
        (("xids",), [{"bus_id": "0000:77:00", "xid": 79, "hours_ago": 1.0}]),
        # A second port that has no cable.
        (("infiniband",), [port(), port("mlx5_1:1", state="DOWN", physical="Polling")]),
        # What the driver does not tell.
        (("gpus", 3, "rows"), None),
        (("gpus", 3, "pcie"), {"width": None, "max_width": None, "generation": None, "max_generation": None}),
    ],
)
def test_what_is_no_fault_of_the_node(path: tuple[Any, ...], value: Any) -> None:
    assert lines(changed(path, value)) == []


def test_a_job_of_one_node_needs_no_network() -> None:
    assert lines(changed(("infiniband",), []), nodes=1) == []


def test_peer_access_is_asked_for_on_pcie() -> None:
    found = changed(("doctor", "link"), {"kind": "host", "reason": "", "pairs": 56, "peer_access": 52})
    (line,) = lines(found, Profile.load("pcie-a100").floors, "p2p")
    assert line.startswith(
        "n03: 52 of 56 pairs of GPUs have peer access, the profile asks for all; look at `nvidia-smi"
    )
    assert lines(found, Floors(), "p2p") == []


def test_a_waived_rule_is_said_with_its_reason_and_stops_nothing() -> None:
    floors = Floors(**{**FLOORS.model_dump(exclude_unset=True), "waived": {"pcie": "one riser is on order"}})
    problems, (note,) = findings(changed(("gpus", 3, "pcie", "width"), 8), floors, "nvlink", 1)
    assert problems == []
    assert "GPU 3 has 8 PCIe lanes" in note
    assert note.endswith("(rule pcie is waived: one riser is on order)")


def test_a_node_slow_within_is_named_with_number_and_floor() -> None:
    gbps = {"all_reduce": {"n00": 310.0, "n01": 21.3}, "all_gather": {"n00": 310.0, "n01": 290.0}}
    (problem,), _ = judge(within_nodes(gbps, FLOORS), FLOORS)
    assert problem.startswith(
        "n01: all_reduce among its GPUs reaches 21.30 GB/s (bus), the profile's floor is 200; look"
    )
    assert "NCCL_P2P_DISABLE" in problem


def test_tcp_instead_of_infiniband_is_one_line() -> None:
    pairs = {("n00", "n01"): 1.11, ("n02", "n03"): 1.2, ("n01", "n02"): 1.31}
    problems, _ = judge(between_nodes({"all_reduce": pairs, "all_gather": dict.fromkeys(pairs, 90.0)}, FLOORS), FLOORS)
    assert len(problems) == 1
    for part in ("all 3 pairs of nodes: 1.11 to 1.31 GB/s (bus) in all_reduce", "floor is 25", "TCP", "NCCL_IB_HCA"):
        assert part in problems[0]
    (single,), _ = judge(between_nodes({"all_reduce": {("n00", "n01"): 1.11}}, FLOORS), FLOORS)
    assert single.startswith("n00 with n01: 1.11 GB/s (bus) in all_reduce, the profile's floor is 25; NCCL may have")


def test_a_node_slow_with_both_neighbours_is_to_blame() -> None:
    good = {("n00", "n01"): 90.0, ("n02", "n03"): 2.0, ("n01", "n02"): 3.0, ("n03", "n00"): 90.0}
    (problem,), _ = judge(between_nodes({"all_reduce": good}, FLOORS), FLOORS)
    assert problem.startswith("n02 with each neighbour: 3.00 GB/s (bus)")
    one = {**good, ("n01", "n02"): 90.0}
    (problem,), _ = judge(between_nodes({"all_reduce": one}, FLOORS), FLOORS)
    assert problem.startswith("n02 with n03: 2.00 GB/s (bus)")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16])
def test_each_round_has_each_node_once_and_all_neighbours_meet(count: int) -> None:
    rounds = neighbours(count)
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    met = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert {frozenset((i, i + 1)) for i in range(count - 1)} <= met


@pytest.mark.parametrize("ranks", [2, 8, 5_800, 8_192, 4096 * 64])
def test_what_ranks_send_adds_up_exactly_in_any_order(ranks: int) -> None:
    """From 5,793 ranks on a ring's sum of their numbers in fp32 was another one, and no job began."""
    sent = numbers(ranks).numpy()
    assert len(set(sent.tolist())) == min(ranks, 61)
    for start in (0, ranks // 3, ranks - 1):  # a ring's parts begin at each of its ranks
        assert np.add.accumulate(np.roll(sent, start), dtype=np.float32)[-1] == int(sent.astype(np.int64).sum())
    assert numbers(ranks).sum() == int(sent.astype(np.int64).sum())


def test_every_packaged_profile_has_floors_for_its_link() -> None:
    for name in Profile.packaged():
        profile = Profile.load(name)
        assert (profile.floors.node_gbps is None) == (profile.device == "cpu"), name
        assert (profile.floors.network_gbps is None) == (profile.device == "cpu"), name
    assert Profile.load("nvlink-h100").floors.node_gbps > Profile.load("nvlink-a100").floors.node_gbps
    assert Profile.load("nvlink-a100").floors.node_gbps > 10 * Profile.load("pcie-a100").floors.node_gbps


def test_a_profile_without_numbers_has_its_links(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    fields = "name: x\ndescription: y\nlink: nvlink\ntime: '1'\ngpu: {name: H100, memory_gib: 80}\n"
    own.write_text(fields + "preflight: {floors: {network_gbps: 1}}\n")
    floors = Profile.load(str(own)).floors
    assert (floors.node_gbps, floors.network_gbps) == (60, 1)
    own.write_text(fields + "preflight: {floors: {network_gbps: null}}\n")
    with pytest.raises(UserError, match=r"floors\.network_gbps None: .*`waived` with a reason"):
        Profile.load(str(own))
    own.write_text(fields + "preflight: {floors: {waived: {network: because}}}\n")
    with pytest.raises(UserError, match=r"waived\.network.*'network_bandwidth'"):
        Profile.load(str(own))


def test_floors_travel_in_one_word() -> None:
    floors = Floors(node_gbps=3, waived={"xid": "a b's"})
    words = ["--folder=x", "--device=cpu", "--processes=1", "--link=none", "--nodes=16"]
    found = rules.Expected.parse([*words, f"--floors={floors.model_dump_json(exclude_defaults=True)}"])
    assert found.floors == floors
    assert found.nodes == 16


def sysfs(root: Path, device: str, number: str = "1", **lines: str) -> None:
    folder = root / device / "ports" / number
    folder.mkdir(parents=True)
    usual = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    for name, text in {**usual, **lines}.items():
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("", {"mlx5_0:1": False, "mlx5_1:1": False, "mlx5_1:2": False, "mlx5_10:1": False}),
        ("mlx5_1", {"mlx5_1:1": True, "mlx5_1:2": True, "mlx5_10:1": True}),
        ("=mlx5_1:2,mlx5_0", {"mlx5_0:1": True, "mlx5_1:2": True}),
        ("^mlx5_1", {"mlx5_0:1": False}),
        ("^=mlx5_1", {"mlx5_0:1": False, "mlx5_10:1": False}),
    ],
)
def test_ports_are_those_that_nccl_may_use(tmp_path: Path, chosen: str, names: dict[str, bool]) -> None:
    for device in ("mlx5_0", "mlx5_1", "mlx5_10"):
        sysfs(tmp_path, device)
    sysfs(tmp_path, "mlx5_1", "2", state="1: DOWN", phys_state="3: Disabled", rate="10 Gb/sec (4X SDR)")
    found = {port["name"]: port for port in node.infiniband(tmp_path, chosen)}
    assert {name: port["asked_for"] for name, port in found.items()} == names
    if not chosen:
        assert found["mlx5_0:1"] == port()
        assert found["mlx5_1:2"] == port("mlx5_1:2", state="DOWN", physical="Disabled", rate=10.0)


def test_no_adapters_at_all(tmp_path: Path) -> None:
    assert node.infiniband(tmp_path / "none", "") == []


def test_the_kernels_log_tells_of_xids(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    microseconds = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 7200) * 1e6)
    log.write_text(
        f"6,1,{max(microseconds, 1)},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
        " SUBSYSTEM=pci\n"
        "6,2,5,-;usb 1-1: NVRM is no subject here\n"
        "4,3,99,-;NVRM: Xid (PCI:0000:af:00): 13, Graphics Exception\n"
    )
    found = node.logged_xids(log)
    assert [(one["bus_id"], one["xid"]) for one in found] == [("0000:3b:00", 79), ("0000:af:00", 13)]
    if microseconds > 0:
        assert found[0]["hours_ago"] == pytest.approx(2.0, abs=0.1)
    with pytest.raises(LookupError, match="cannot be read"):
        node.logged_xids(tmp_path / "none")


def test_what_the_driver_does_not_tell_is_listed() -> None:
    gpus = changed(("gpus", 3, "rows"), None)["gpus"]
    gpus[2]["pcie"] = {**gpus[2]["pcie"], "max_width": None}
    assert node.missing_facts(gpus) == ["the width of PCIe links", "remapped rows of memory"]
    assert node.missing_facts(report()["gpus"]) == []
