"""Pre-flight rules: each problem is one line that begins with the node's name."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_flux.comm.host_schedule import default_layout
from megatron_flux.slurm.preflight import rules
from megatron_flux.slurm.preflight.ranks import numbers
from megatron_flux.slurm.preflight.rules import between_nodes, within_nodes
from megatron_flux.slurm.profile import Profile

FLOORS = Profile.load("nvlink-h100").floors
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
        "driver": [{"slowed": False, "uncorrected": 0.0} for _ in range(8)],
        "gpus": [
            {
                "name": "NVIDIA H100 80GB HBM3",
                "memory_gib": 79.2,
                "used_by_others_gib": 0.5,
                "gemm_tflops": 700.0 + i,
            }
            for i in range(8)
        ],
        "unknown": [],
    }


def changed(path: tuple[Any, ...], value: Any, node: str = "n03") -> dict[str, Any]:
    found = copy.deepcopy(report(node))
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return found


CASES = [
    (("numactl",), False, "numactl is not installed; set numa_binding: null"),
    (("gpus",), report()["gpus"][:7], "7 GPU(s), the profile says 8"),
    (("gpus", 3, "memory_gib"), 39.4, "GPU 3 has 39.4 GiB, the profile says 80"),
    (("gpus", 3, "used_by_others_gib"), 11.5, "11.5 GiB of GPU 3 are in use by another process"),
    (("gpus", 3, "gemm_tflops"), 300.0, "GPU 3 reaches 300.0 TFLOP/s, the median is 703.0"),
    (("driver",), [{"error": "NVML: unknown error"}], "the driver does not answer: NVML: unknown error"),
    (("driver", 3, "uncorrected"), 2.0, "GPU 3 has 2 uncorrected memory error(s)"),
    (("doctor", "link"), {"kind": "p2p", "reason": "2 pairs"}, "the GPUs' link is p2p (2 pairs), the profile says nvl"),
]


@pytest.mark.parametrize(("path", "value", "said"), CASES)
def test_problems_of_a_node(path: tuple[Any, ...], value: Any, said: str) -> None:
    (problem,) = rules.node_problems(changed(path, value), EXPECTED)
    assert problem.startswith(f"n03: {said}")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("doctor", "versions", "nccl"), "2.27", "n01: nccl is 2.27, 2 of 3 nodes have 2.28.9"),
        (("doctor", "link", "kind"), "host", "n01: link is host, 2 of 3 nodes have nvlink"),
        (("gpus",), [{"gemm_tflops": 400.0}], "n01 reaches 400.0 TFLOP/s per GPU, the median is 703.5"),
    ],
)
def test_differences_between_nodes(path: tuple[Any, ...], value: Any, said: str) -> None:
    (problem,) = rules.differences([report("n00"), changed(path, value, "n01"), report("n02")], EXPECTED)
    assert problem.startswith(said)


@pytest.mark.parametrize("tp", [0, 2, 8])
def test_shared_memory_is_counted_for_all_groups_of_a_node(tp: int) -> None:
    expected = EXPECTED.model_copy(update={"link": "host", "host_tp": tp})
    assert expected.model_copy(update={"link": "p2p"}).shared_memory == 0, "a job can do without"
    need = 8 // tp * default_layout(tp).total_bytes if tp else 0
    assert expected.shared_memory == need
    problems = rules.node_problems(changed(("shared_memory",), (64 << 20, 31 << 20)), expected)
    assert [line.partition(";")[0] for line in problems] == [
        f"n03: /dev/shm has 31 MiB left of 64, the link through host memory needs {need >> 20} MiB"
    ] * (tp > 0)


def test_slow_nodes_and_pairs_of_nodes() -> None:
    """TCP instead of InfiniBand is one line; a node that is slow with both neighbours is to blame."""
    (problem,) = within_nodes({"n00": 310.0, "n01": 21.3}, FLOORS)
    assert problem.startswith("n01: an all_reduce among its GPUs reaches 21.30 GB/s (bus), the profile's floor is 200;")
    pairs = {("n00", "n01"): 1.11, ("n02", "n03"): 1.2, ("n01", "n02"): 1.31}
    (problem,) = between_nodes(pairs, FLOORS)
    for part in ("all 3 pairs of nodes: 1.11 to 1.31 GB/s (bus)", "floor is 25", "TCP", "NCCL_IB_HCA"):
        assert part in problem
    some = {("n00", "n01"): 90.0, ("n02", "n03"): 2.0, ("n01", "n02"): 3.0, ("n03", "n00"): 90.0}
    (problem,) = between_nodes(some, FLOORS)
    assert problem.startswith("n02 with each neighbour: 3.00 GB/s (bus)")
    (problem,) = between_nodes({**some, ("n01", "n02"): 90.0}, FLOORS)
    assert problem.startswith("n02 with n03: 2.00 GB/s (bus)")


@pytest.mark.parametrize("ranks", [2, 5_800, 4096 * 64])
def test_numbers_add_up_exactly_in_any_order(ranks: int) -> None:
    """From 5,793 ranks on a ring's sum of their numbers in fp32 was another one, and no job began."""
    sent = numbers(ranks).numpy()
    for start in (0, ranks // 3, ranks - 1):  # a ring's parts begin at each of its ranks
        assert np.add.accumulate(np.roll(sent, start), dtype=np.float32)[-1] == int(sent.astype(np.int64).sum())
