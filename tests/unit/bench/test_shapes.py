"""The calls of large models that benchmarks and ``tune`` make."""

from megatron_flux.bench.cases import Case
from megatron_flux.bench.options import OpsRun


def cases_of(preset: str, tokens: str, **more: str) -> list[Case]:
    return OpsRun(tp=8, preset=preset, tokens=tokens, **more).cases()


def test_shapes_of_gpt3() -> None:
    cases = cases_of("gpt3-175b", "8192")
    found = {(c.layer, c.direction): (c.op, c.n, c.k) for c in cases}
    assert found["fc1", "forward"] == ("all_gather_gemm", 6144, 12288)
    assert found["fc2", "forward"] == ("gemm_reduce_scatter", 12288, 6144)
    assert found["qkv", "forward"] == ("all_gather_gemm", 4608, 12288)
    assert found["fc1", "dgrad"] == ("gemm_reduce_scatter", 12288, 6144)
    assert found["fc2", "dgrad"] == ("all_gather_gemm", 6144, 12288)
    assert all(c.bytes_received(8) == 7 * 1024 * 12288 * 2 for c in cases)
