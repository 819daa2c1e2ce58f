"""Tables of ``bench layer`` and ``tune``."""

from typing import Any

import pytest

from megatron_flux.bench import tables
from megatron_flux.ops.tuner.cache import Entry

LAYER = {
    "model": "gpt3-175b", "seq": 2048, "micro_batch": 4, "layers": 4, "arm": "flux_te", "training": True,
    "ms_per_layer": 20.0, "ms_per_layer_low": 19.0, "ms_per_layer_high": 21.0, "speedup_vs_te": 1.177,
    "speedup_vs_te_ci95": [1.17, 1.18], "hidden_share": 0.0, "host_ms_per_step": 9.0, "sm_clock_mhz": 1450.0,
    "peak_memory_gb": 12.5, "breakdown": {"communication_exposed_ms": 5.0}, "agreement": {"ok": False},
    "flux_fallbacks": {"row: [fp8]": 4},
}  # fmt: skip


def test_layers_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    summary: dict[str, Any] = {"device": "H200", "tp": 4, "link": "nvlink", "environment": {"NCCL_NVLS_ENABLE": "0"}}
    bound = {**LAYER, "arm": "no_communication", "training": False, "agreement": None}
    tables.show_layers(
        {**summary, "rows": [LAYER, bound], "skipped": [{**LAYER, "arm": "te_ub", "reason": "<it> [did] not"}]}
    )
    said = capsys.readouterr().out
    for part in (
        "1.177x [1.170-1.180]",
        "NO",
        "no_communication, a bound",
        "te_ub skipped: <it> [did] not",
        "row: [fp8]",
    ):
        assert part in said
    key = "all_gather_gemm m=8 n=6 k=4 float32 [k,n] tp=2 p2p | cpu | flux 0.2.0"
    plans = [
        ("fc2", key, Entry(backend="reference", ms={"reference": 2.0, "fused": 1.99})),
        ("own", key, Entry(backend="fused")),
    ]
    tables.show_plans(plans)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.endswith("2.000 1.990 2.000 1.00x reference") for line in lines)
    assert any(line.endswith("- - - - fused") for line in lines)
