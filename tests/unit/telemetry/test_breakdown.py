"""Where the time goes in traces made by hand: communication, copies, and parts of steps."""

from typing import Any

import pytest

from megatron_flux.telemetry.breakdown import of_layers, of_steps
from tests import documented


def event(name: str, start: float, end: float, stream: int = 7, cat: str = "kernel") -> dict[str, Any]:
    """On the GPU or, in the categories of the host, on the thread ``stream``."""
    args = {"stream": stream}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": stream, "args": args}


GEMM, NCCL, COMPUTE, SIDE = "nvjet_tst", "ncclDevKernel_AllGather_RING_LL", 7, 20


def times(*events: dict[str, Any], layers: int = 1) -> dict[str, float]:
    beside = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9e9, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    return of_layers({"traceEvents": [*beside, *events]}, layers)


@pytest.mark.parametrize("layers", [1, 4])
def test_communication_is_hidden_where_anything_computes(layers: int) -> None:
    found = times(
        event(NCCL, 0, 1000, SIDE),  # alone: exposed
        event(GEMM, 1000, 3000, COMPUTE),
        event(NCCL, 1500, 2500, SIDE),  # wholly beside the GEMM: hidden
        event(GEMM, 3500, 4000, COMPUTE),  # a gap of 500 before it, of which 300 are idle
        event(NCCL, 3300, 4200, SIDE),  # 200 before, 500 beside, 200 behind the GEMM
        layers=layers,
    )
    expected = {"communication_exposed_ms": 1.4, "communication_hidden_ms": 1.5, "communication_ms": 2.9}
    expected |= {"gemm_ms": 2.5, "idle_ms": 0.3, "span_ms": 4.2, "launches": 5}
    assert {name: found[name] for name in expected} == {
        name: pytest.approx(value / layers) for name, value in expected.items()
    }


def test_copies_between_gpus_are_communication() -> None:
    within = "Memcpy DtoD (Device -> Device)"
    gemm = event("ag_gemm_kernel", 0, 1000, COMPUTE)
    # A peer's mapped memory looks like the device's own; beside the GEMM's stream such a copy is a push.
    for name in ("Memcpy PtoP (Device -> Device)", within):
        assert times(gemm, event(name, 0, 500, SIDE, "gpu_memcpy"))["communication_hidden_ms"] == 0.5
    own = times(gemm, event(within, 1000, 1500, COMPUTE, "gpu_memcpy"), event("Memset", 1500, 1600, 7, "gpu_memset"))
    assert (own["communication_ms"], own["fused_ms"]) == (0, 1.0)
    assert own["other_ms"] == pytest.approx(0.6)


def steps(*windows: tuple[float, float]) -> list[dict[str, Any]]:
    return [event(f"flux::step {i}", *window, 1, "user_annotation") for i, window in enumerate(windows, start=5)]


GPU = [
    *steps((0, 10_000), (20_000, 30_000)),
    event("nvjet_tst_128x256", 1_000, 3_000),
    event("ncclDevKernel_AllGather", 2_000, 5_000, 8),  # 1 ms beside the GEMM, 2 ms alone
    event("ag_gemm_kernel", 5_000, 6_000),
    event("flash_fwd_kernel", 6_000, 6_500),
    event("rmsnorm_fwd", 6_500, 7_000),
    event("elementwise", 7_000, 7_250),
    event("flux::optimizer", 8_000, 9_900, cat="gpu_user_annotation"),
    event("multi_tensor_apply", 8_000, 9_000),
    event("ncclDevKernel_AllReduce", 9_000, 9_500, 8),
    event("nvjet_tst_128x256", 12_000, 19_000),  # between the steps: recording, measuring
    event("nvjet_tst_128x256", 21_000, 22_000),
]


def test_parts_of_steps_are_disjoint_and_add_up() -> None:
    found = of_steps({"traceEvents": GPU}, (5, 6), 3)
    assert found.keys() == documented.fields("breakdown").keys()
    # Per step, of two.
    parts = {"gemm": 1.5, "fused": 0.5, "attention": 0.25, "norm": 0.25, "optimizer": 0.5, "other": 0.125}
    parts |= {"communication_exposed": 1.25, "idle": 5.625}
    assert found == {
        **{"schema": 1, "rank": 3, "steps": [5, 6], "span_ms": 10, "parts": parts},
        **{"communication_hidden_ms": 0.5, "launches": 4.5},
    }
    assert sum(parts.values()) == found["span_ms"]
    with pytest.raises(ValueError, match="no range of a step"):
        of_steps({"traceEvents": GPU[2:]}, (5, 6), 0)
