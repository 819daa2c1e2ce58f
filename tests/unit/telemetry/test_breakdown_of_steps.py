"""``breakdown.json`` from traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flux.metrics.schema import BREAKDOWN_PARTS, Breakdown, names
from megatron_flux.telemetry.breakdown import of_steps as parts


def event(name: str, start: float, end: float, cat: str = "kernel", pid: Any = 0, tid: int = 7) -> dict[str, Any]:
    args = {"stream": tid}
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "pid": pid, "tid": tid, "args": args}


def steps(*windows: tuple[float, float]) -> list[dict[str, Any]]:
    return [event(f"flux::step {i}", *window, "user_annotation", 1, 1) for i, window in enumerate(windows, start=5)]


GPU = [
    *steps((0, 10_000), (20_000, 30_000)),
    event("nvjet_tst_128x256", 1_000, 3_000),
    event("ncclDevKernel_AllGather", 2_000, 5_000, tid=8),  # 1 ms beside the GEMM, 2 ms alone
    event("ag_gemm_kernel", 5_000, 6_000),
    event("flash_fwd_kernel", 6_000, 6_500),
    event("rmsnorm_fwd", 6_500, 7_000),
    event("elementwise", 7_000, 7_250),
    event("flux::optimizer", 8_000, 9_900, "gpu_user_annotation"),
    event("multi_tensor_apply", 8_000, 9_000),
    event("ncclDevKernel_AllReduce", 9_000, 9_500, tid=8),
    event("nvjet_tst_128x256", 12_000, 19_000),  # between the steps: recording, measuring
    event("nvjet_tst_128x256", 21_000, 22_000),
]


def test_parts_are_disjoint_and_add_up() -> None:
    found = parts({"traceEvents": GPU}, (5, 6), 3)
    assert set(found) == names(Breakdown)
    assert (found["source"], found["rank"], found["steps"]) == ("gpu", 3, [5, 6])
    assert found["span_ms"] == 10
    # Per step, of two.
    assert found["parts"] == {
        "gemm": 1.5,
        "fused": 0.5,
        "attention": 0.25,
        "norm": 0.25,
        "optimizer": 0.5,
        "other": 0.125,
        "communication_exposed": 1.25,
        "idle": 5.625,
    }
    assert sum(found["parts"].values()) == pytest.approx(found["span_ms"])
    assert found["communication_hidden_ms"] == 0.5
    assert found["launches"] == 4.5


def test_a_trace_of_the_host_alone() -> None:
    """Containers say nothing; the transport's threads copy beside the step; a wait without an operator is idle."""
    host = [
        *steps((0, 10_000)),
        event("_ColumnParallelLinear", 0, 9_000, "cpu_op", 1, 1),
        event("autograd::engine::evaluate_function: X", 0, 9_000, "cpu_op", 1, 1),
        event("c10d::_allgather_base_", 1_000, 1_500, "cpu_op", 1, 1),
        event("gloo:all_gather", 1_200, 3_000, "user_annotation", 1, 2),
        event("aten::copy_", 1_300, 2_900, "cpu_op", 1, 2),
        event("aten::matmul", 4_000, 6_000, "cpu_op", 1, 1),
        event("aten::mm", 4_500, 6_000, "cpu_op", 1, 1),
        event("flux::optimizer", 8_000, 9_000, "user_annotation", 1, 1),
        event("aten::add_", 8_000, 8_500, "cpu_op", 1, 1),
    ]
    found = parts({"traceEvents": host}, (5, 5), 0)
    assert found["source"] == "cpu"
    nothing = {"fused": 0, "attention": 0, "norm": 0}
    shown = {"gemm": 1.5, "other": 0.5, "optimizer": 0.5, "communication_exposed": 2.0, "idle": 5.5}
    assert found["parts"] == nothing | shown
    assert tuple(found["parts"]) == BREAKDOWN_PARTS


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="no range of a step"):
        parts({"traceEvents": GPU[2:]}, (5, 6), 0)
