"""Names of kernels and operators, and the busy time of categories in traces made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_flux.telemetry.breakdown import CATEGORIES, category, cpu_category, of_layers

NAMES = {
    "gemm": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(T1::Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>(int)",
    ],
    "fused": ["ag_gemm_kernel", "gemm_rs_kernel", "_ag_gemm_kernel_0d1d", "gemm_one_shot_kernel"],
    "communication": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "gather_wait_kernel",
        "one_shot_kernel",
        "two_shot_kernel",
        "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int, int, int, int, void**, int, void*)",
        "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)",
        "void c10d::symmetric_memory::barrier_kernel<false>(unsigned int**, unsigned long, unsigned long)",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128_1x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o<true, __nv_bfloat16, float, 128>(...)",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false, false>(float*, int)",
    ],
    "norm": [
        "void transformer_engine::normalization::ln_fwd_tuned_kernel<transformer_engine::normalization::Kernel_traits>",
        "void transformer_engine::normalization::rmsnorm_bwd_finalize_tuned_kernel<Kernel_traits>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int)",
        "triton_red_fused_native_layer_norm_0",
    ],
    "other": [
        "triton_poi_fused_add_gelu_0",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>(int)",
    ],
}


@pytest.mark.parametrize(("expected", "name"), [(c, name) for c, names in NAMES.items() for name in names])
def test_kernels_are_known_by_name(expected: str, name: str) -> None:
    assert category(name) == expected
    assert expected in CATEGORIES


@pytest.mark.parametrize(
    ("name", "expected"),
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
def test_operators_of_the_host_are_known_by_name(name: str, expected: str | None) -> None:
    assert cpu_category(name) == expected


def event(name: str, start: float, end: float, stream: int, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "args": {"stream": stream}}


GEMM, NCCL, COMPUTE, SIDE = "nvjet_tst", "ncclDevKernel_AllGather_RING_LL", 7, 20


def times(*events: dict[str, Any], layers: int = 1) -> dict[str, float]:
    beside = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9e9, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    return of_layers({"traceEvents": [*beside, *events]}, layers)


def test_communication_is_hidden_where_anything_computes() -> None:
    found = times(
        event(NCCL, 0, 1000, SIDE),  # alone: exposed
        event(GEMM, 1000, 3000, COMPUTE),
        event(NCCL, 1500, 2500, SIDE),  # wholly beside the GEMM: hidden
        event(GEMM, 3500, 4000, COMPUTE),  # a gap of 500 before it, of which 300 are idle
        event(NCCL, 3300, 4200, SIDE),  # 200 before, 500 beside, 200 behind the GEMM
    )
    assert found["communication_exposed_ms"] == pytest.approx(1.0 + 0.2 + 0.2)
    assert found["communication_hidden_ms"] == pytest.approx(1.0 + 0.5)
    assert found["communication_ms"] == pytest.approx(2.9)
    assert found["gemm_ms"] == pytest.approx(2.5)
    assert found["idle_ms"] == pytest.approx(0.3)
    assert found["span_ms"] == pytest.approx(4.2)
    assert found["launches"] == 5


def test_figures_are_per_layer() -> None:
    events = [event(GEMM, 0, 4000, COMPUTE), event(NCCL, 4000, 6000, SIDE)]
    found = times(*events, layers=4)
    assert (found["gemm_ms"], found["communication_exposed_ms"], found["span_ms"]) == (1.0, 0.5, 1.5)


def test_every_kernel_counts_as_cover() -> None:
    for name in (n for c, names in NAMES.items() if c != "communication" for n in names):
        found = times(event(GEMM, 0, 10, COMPUTE), event(NCCL, 10, 110, SIDE), event(name, 60, 110, COMPUTE))
        assert found["communication_hidden_ms"] == pytest.approx(0.05), name


def test_copies_between_gpus_are_communication() -> None:
    between = "Memcpy PtoP (Device -> Device)"
    within = "Memcpy DtoD (Device -> Device)"
    gemm = event("ag_gemm_kernel", 0, 1000, COMPUTE)
    assert times(gemm, event(between, 0, 500, SIDE, "gpu_memcpy"))["communication_hidden_ms"] == 0.5
    # A peer's mapped memory looks like the device's own; beside the GEMM's stream such a copy is a push.
    assert times(gemm, event(within, 0, 500, SIDE, "gpu_memcpy"))["communication_hidden_ms"] == 0.5
    own = times(gemm, event(within, 1000, 1500, COMPUTE, "gpu_memcpy"), event("Memset", 1500, 1600, 7, "gpu_memset"))
    assert own["communication_ms"] == 0
    assert own["other_ms"] == pytest.approx(0.6)
    assert own["fused_ms"] == 1.0


def test_categories_add_up_on_one_stream() -> None:
    names = [names[0] for names in NAMES.values()]
    found = times(*(event(name, 100 * i, 100 * (i + 1), COMPUTE) for i, name in enumerate(names)))
    assert sum(found[f"{c}_ms"] for c in CATEGORIES) == pytest.approx(found["span_ms"])
    assert found["idle_ms"] == 0


def test_a_trace_without_gpu_is_empty() -> None:
    assert times() == of_layers({"traceEvents": []}, 1) == {}
