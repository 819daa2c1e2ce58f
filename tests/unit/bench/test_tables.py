"""The table of ``bench layer``."""

import contextlib
import io
from typing import Any

from megatron_flux.bench import tables

SUMMARY = {"device": "H200", "tp": 4, "link": "nvlink", "environment": {"NCCL_NVLS_ENABLE": "0"}}
LAYER = {
    "model": "gpt3-175b", "seq": 2048, "micro_batch": 4, "layers": 4, "arm": "te", "training": True,
    "ms_per_layer": 20.0, "ms_per_layer_low": 19.0, "ms_per_layer_high": 21.0, "speedup_vs_te": 1.0,
    "speedup_vs_te_ci95": None, "hidden_share": 0.0, "host_ms_per_step": 9.0, "sm_clock_mhz": 1450.0,
    "peak_memory_gb": 12.5, "breakdown": {"communication_exposed_ms": 5.0}, "agreement": {"ok": True},
}  # fmt: skip


def printed(show: Any, *arguments: Any, **more: Any) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(*arguments, **more)
    assert "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def test_layers_and_what_was_skipped() -> None:
    flux = {**LAYER, "arm": "flux_te", "speedup_vs_te": 1.177, "speedup_vs_te_ci95": [1.17, 1.18], "cuda_graph": True}
    flux |= {"agreement": {"ok": False}, "flux_fallbacks": {"row: [fp8]": 4}}
    bound = {**LAYER, "arm": "no_communication", "training": False, "agreement": None, "hidden_share": 1.0}
    other = {**LAYER, "mode": "decode", "context_length": 2048, "fp8": "current", "sequence_parallel": False}
    lora = {**LAYER, "frozen": True, "lora": 16, "lora_targets": ["linear_qkv"]}
    lora |= {"agreement": {"ok": True, "left_out": "gradients"}}
    skipped = [{**LAYER, "arm": "te_ub", "reason": "<it> [did] not start"}]
    said = "\n".join(
        printed(tables.show_layers, {**SUMMARY, "rows": [LAYER, flux, bound, other, lora], "skipped": skipped})
    )
    for part in ("gpt3-175b-2048x4, 4 layers", "20.000 (19.000-21.000)", "1.177x [1.170-1.180]", "flux_te (graph)",
                 "NO", "no_communication, a bound", "te_ub skipped: <it> [did] not start", "1450",
                 "flux_te: 4 calls ran stock: row: [fp8]",
                 "gpt3-175b-2048x4-lora16-linear_qkv, 4 layers", "y alone",
                 "gpt3-175b-2048x4-decode-context-2048-current-no-sp, 4 layers"):  # fmt: skip
        assert part in said
    printed(tables.show_layers, {**SUMMARY, "rows": [], "skipped": []})
