"""What the pre-flight says of reports: each problem in one line that begins with the node's name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.comm.host_schedule import Layout
from megatron_flux.slurm.preflight import rules
from megatron_flux.telemetry import environment

EXPECTED = rules.Expected(
    folder=Path("x"), device="cuda", processes=8, link="nvlink", gpu_name="H100", gpu_memory_gib=80, needs_numactl=True
)


def report(node: str = "n03") -> dict[str, Any]:
    return {
        "node": node,
        "numactl": True,
        "shared_memory": (64 << 30, 32 << 30),
        "doctor": {
            "versions": {"torch": "2.11.0", "nccl": "2.28.9", "transformer-engine": None},
            "devices": ["NVIDIA H100 80GB HBM3"] * 8,
            "link": {"kind": "nvlink", "reason": "", "pairs": 56, "peer_access": 56},
            "problems": [],
        },
        "driver": [{"slowed": False, "uncorrected": 0.0, "max_sm_mhz": 1980.0} for _ in range(8)],
        "gpus": [
            {
                "name": "NVIDIA H100 80GB HBM3",
                "memory_gib": 79.2,
                "capability": [9, 0],
                "used_by_others_gib": 0.5,
                "gemm_tflops": 700.0 + i,
                "pcie": {"width": 16, "max_width": 16, "generation": 5, "max_generation": 5},
                "rows": {"pending": False, "failed": False},
                "bus_id": f"00000000:0{i}:00.0",
            }
            for i in range(8)
        ],
        "xids": [],
        "unknown": [],
        "infiniband": [
            {
                "name": f"mlx5_{i}:1",
                "state": "ACTIVE",
                "physical": "LinkUp",
                "rate": 400.0,
                "layer": "InfiniBand",
                "asked_for": False,
            }
            for i in range(8)
        ],
    }


def changed(path: tuple[Any, ...], value: Any, node: str = "n03") -> dict[str, Any]:
    found = copy.deepcopy(report(node))
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


def test_a_good_node_has_no_problem() -> None:
    assert rules.node_problems(report(), EXPECTED) == []
    assert rules.differences([report("n00"), report("n01"), report("n02")], EXPECTED) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("doctor", "problems"), ["torch 2.0 is too old"], "n03: torch 2.0 is too old"),
        (("numactl",), False, "n03: numactl is not installed"),
        (("gpus",), report()["gpus"][:7], "n03: 7 GPU(s), the profile says 8"),
        (("gpus", 2, "name"), "NVIDIA A100-SXM4-80GB", "n03: GPU 2 is NVIDIA A100-SXM4-80GB, the profile says H100"),
        (("gpus", 2, "name"), "NVIDIA RTX H1000", "n03: GPU 2 is NVIDIA RTX H1000, the profile says H100"),
        (("gpus", 5, "memory_gib"), 39.4, "n03: GPU 5 has 39.4 GiB, the profile says 80"),
        (("gpus", 1, "used_by_others_gib"), 61.2, "n03: 61.2 GiB of GPU 1 are in use by another process"),
        (("gpus", 6, "gemm_tflops"), 310.0, "n03: GPU 6 reaches 310.0 TFLOP/s, the median is 702.5"),
        (("doctor", "link"), {"kind": "p2p", "reason": "no NVLink"}, "n03: the GPUs' link is p2p (no NVLink)"),
        (("driver", 4, "slowed"), True, "n03: GPU 4 is slowed down by its hardware"),
        (("driver", 4, "uncorrected"), 3.0, "n03: GPU 4 has 3 uncorrected memory error(s)"),
        (("driver",), [{"error": "NVML: GPU is lost"}], "n03: the driver does not answer: NVML: GPU is lost"),
    ],
)
def test_what_is_wrong_with_a_node(path: tuple[Any, ...], value: Any, said: str) -> None:
    problems = rules.node_problems(changed(path, value), EXPECTED)
    assert len(problems) == 1, problems
    assert problems[0].startswith(said)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("doctor", "versions", "nccl"), "2.27.3", "n01: nccl is 2.27.3, 2 of 3 nodes have 2.28.9"),
        (("doctor", "versions", "transformer-engine"), "2.9", "n01: transformer-engine is 2.9, 2 of 3 nodes have none"),
        (("doctor", "devices"), ["NVIDIA H800"], "n01: device is NVIDIA H800, 2 of 3 nodes have NVIDIA H100"),
        (("doctor", "link", "kind"), "p2p", "n01: link is p2p, 2 of 3 nodes have nvlink"),
        (
            ("infiniband", 5, "state"),
            "DOWN",
            "n01: active InfiniBand ports and their Gb/s is 7 at 400, 2 of 3 nodes have 8 at 400",
        ),
        (("driver",), [{"max_sm_mhz": 1755.0}], "n01: highest SM clock (MHz) is 1755, 2 of 3 nodes have 1980"),
        (("gpus",), [{"gemm_tflops": 400.0}], "n01 reaches 400.0 TFLOP/s per GPU, the median is 703.5"),
    ],
)
def test_what_nodes_must_have_in_common(path: tuple[Any, ...], value: Any, said: str) -> None:
    problems = rules.differences([report("n00"), changed(path, value, "n01"), report("n02")], EXPECTED)
    assert len(problems) == 1, problems
    assert problems[0].startswith(said)


def test_only_nvlink_asks_for_nvlink() -> None:
    for link in ("p2p", "host"):
        pcie = rules.Expected(folder=Path("x"), device="cuda", processes=8, link=link)
        found = changed(("doctor", "link"), {"kind": "host", "reason": "no peer access"})
        assert rules.node_problems(found, pcie) == []


def test_an_fp8_wire_needs_gpus_that_can() -> None:
    found = changed(("gpus", 3, "capability"), [8, 6])
    expected = rules.Expected(folder=Path("x"), device="cuda", processes=8, link="host", host_tp=8)
    assert rules.node_problems(found, expected) == []
    (line,) = rules.node_problems(found, expected.model_copy(update={"needs_fp8": True}))
    assert line == "n03: wire fp8 needs compute capability 8.9, GPU 3 has 8.6; use wire int8"


def test_shared_memory_is_counted_for_all_groups_of_a_node() -> None:
    container = changed(("shared_memory",), (64 << 20, 63 << 20))
    for tp in (0, 2, 8):
        expected = rules.Expected(folder=Path("x"), device="cuda", processes=8, link="host", host_tp=tp)
        need = 8 // tp * Layout(tp).total_bytes if tp else 0
        assert expected.shared_memory == need
        lines = [line for rule, line in rules.node_findings(container, expected) if rule == "shared_memory"]
        assert len(lines) == (tp > 0)
        if tp:
            said = f"n03: /dev/shm has 63 MiB left of 64, the link through host memory needs {need >> 20} MiB; look for"
            assert lines[0].startswith(said)
    assert rules.node_findings(report(), expected) == []


def test_other_sources_of_the_same_version_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    found = environment.versions()["megatron-flux sources"]
    assert found == environment.source_hash()
    other = environment.source_hash(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    environment.source_hash.cache_clear()
    assert environment.source_hash(tmp_path) not in (other, found)
