"""``breakdown.json`` from traces made by hand, and ranks' traces merged and aligned."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.schema import BREAKDOWN, BREAKDOWN_PARTS
from megatron_flux.telemetry.intervals import common
from megatron_flux.telemetry.kernel_names import cpu_category
from megatron_flux.telemetry.profiler import trace_file, write_trace
from megatron_flux.telemetry.trace_merge import clock_shifts_ns, merge, merge_run
from megatron_flux.telemetry.trace_parts import parts


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
    assert set(found) == set(BREAKDOWN)
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


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm_", "gemm"),
        ("aten::baddbmm", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("aten::native_layer_norm_backward", "norm"),
        ("gloo:reduce_scatter", "communication"),
        ("c10d::_reduce_scatter_base_", "communication"),
        ("aten::embedding", "other"),
        ("_RowParallelLinearBackward", None),
        ("flux::all_gather_gemm m=1", None),
    ],
)
def test_operators_of_the_host_are_known_by_name(name: str, category: str | None) -> None:
    assert cpu_category(name) == category


def test_common() -> None:
    assert common([(0, 4), (5, 8)], [(1, 2), (3, 6), (7, 9)]) == [(1, 2), (3, 4), (5, 6), (7, 8)]
    assert common([(0, 1)], [(1, 2)]) == []


def rank_trace(rank: int, host: str, clock_ns: list[int], base_ns: int, at_us: float) -> dict[str, Any]:
    meta = {"ph": "M", "name": "process_labels", "pid": 900, "tid": 0, "args": {"labels": "CPU"}}
    flow = {"ph": "s", "id": 1, "pid": 900, "tid": 1, "ts": at_us, "cat": "ac2g", "name": "ac2g"}
    return {
        "baseTimeNanoseconds": base_ns,
        "flux": {"rank": rank, "host": host, "steps": [5, 6], "clock_ns": clock_ns},
        "traceEvents": [meta, event("flux::step 5", at_us, at_us + 10, "user_annotation", 900, 1), flow],
    }


def test_hosts_are_aligned_by_their_barriers() -> None:
    """Host b's clock is 5 ms ahead; one barrier was left late by one rank."""
    barriers = [1_000_000, 2_000_000, 3_000_000]
    late = [1_000_000, 2_900_000, 3_000_000]
    ahead = [t + 5_000_000 for t in barriers]
    about = [
        {"host": "a", "clock_ns": barriers},
        {"host": "a", "clock_ns": barriers},
        {"host": "b", "clock_ns": ahead},
        {"host": "b", "clock_ns": [t + 5_000_000 for t in late]},
    ]
    assert clock_shifts_ns(about) == {"a": 0.0, "b": -5_000_000.0}
    traces = [
        rank_trace(0, "a", barriers, 10_000_000, 100.0),
        rank_trace(1, "b", ahead, 15_000_000, 103.0),
        rank_trace(2, "b", ahead, 16_000_000, 100.0),
    ]
    merged = merge(traces)
    begun = {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"}
    assert list(begun.values()) == [0.0, 3.0, 1000.0]
    assert len(begun) == 3
    assert len({e["id"] for e in merged["traceEvents"] if e["ph"] == "s"}) == 3
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 CPU (a)", "rank 1 CPU (b)", "rank 2 CPU (b)"]
    assert merged["flux"]["clock_shifts_us"] == {"a": 0.0, "b": -5000.0}


def test_ranks_of_one_host_are_not_shifted() -> None:
    one, other = {"host": "a", "clock_ns": [1, 2]}, {"host": "a", "clock_ns": [900, 901]}
    assert clock_shifts_ns([one, other]) == {"a": 0.0}


def test_merging_a_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_trace(trace_file(tmp_path / "flux", rank), rank_trace(rank, "a", [1], 0, 5.0))
    (written,) = merge_run(tmp_path)
    again = merge_run(tmp_path)  # does not merge what was merged
    assert again == [written]
    assert json.loads(gzip.decompress(written.read_bytes()))["flux"]["ranks"] == [0, 1]


def test_bad_traces_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no traces"):
        merge_run(tmp_path)
    file = trace_file(tmp_path / "flux", 0)
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(UserError, match=r"rank00000.json.gz cannot be read"):
        merge_run(tmp_path)
    file.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(UserError, match="no trace of this program"):
        merge_run(tmp_path)
