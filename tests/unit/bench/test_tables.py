"""Tables of ``bench ops``, ``tune`` and ``bench layer``."""

import contextlib
import io
from typing import Any

from megatron_flux.bench import tables
from megatron_flux.ops.tuner.cache import Entry

ROW = {
    "op": "gemm_reduce_scatter", "model": "gpt3-175b", "layer": "fc2", "direction": "forward", "m": 8192, "n": 12288,
    "k": 6144, "dtype": "bfloat16", "gemm_ms": 1.0, "nccl_ms": 0.5, "serial_ms": 1.5,
    "fused_ms": 1.1, "tuned_ms": 1.6, "tuned_choice": "fused <x>", "e_overlap": -0.2,
    "bound_ms": 1.0,
}  # fmt: skip
SUMMARY = {"device": "H200", "tp": 4, "link": "nvlink", "environment": {"NCCL_NVLS_ENABLE": "0"}, "rows": [ROW]}
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


def line(lines: list[str], *words: str) -> str:
    """The one line with these words, single-spaced."""
    found = [line for line in lines if all(word in line.split() for word in words)]
    assert len(found) == 1, found
    return " ".join(found[0].split())


def test_calls_in_a_table_and_a_line() -> None:
    lines = printed(tables.show_ops, SUMMARY)
    assert lines[0] == "4 x H200, nvlink, tp = 4, 1 call(s)"
    assert line(lines, "gpt3-175b") == (
        "RS gpt3-175b fc2 forward 8192 x 12288 x 6144 1.000 0.500 1.500 1.100 1.600 80% -20% fused <x>"
    )
    said = tables.line(ROW)
    for part in ("fc2", "gemm 1.000", "tuned 1.600", "E -20%", "[fused <x>]"):
        assert part in said
    assert tables.efficiency({**ROW, "serial_ms": 1.0}, "fused") is None
    assert printed(tables.show_ops, {**SUMMARY, "rows": []})[0].endswith("0 call(s)")


def key(m: int = 8) -> str:
    return f"all_gather_gemm m={m} n=6 k=4 float32 [k,n] tp=2 p2p | cpu | flux 0.2.0"


def test_plans_by_call() -> None:
    # The fastest time is not always the plan: it may have won by less than the margin.
    close = Entry(backend="reference", ms={"reference": 2.0, "fused": 1.99})
    lines = printed(tables.show_plans, [("model fc2 dgrad", key(8), close), ("own", key(16), Entry(backend="fused"))])
    assert lines[0] == "cpu | flux 0.2.0: 2 call(s)"
    assert line(lines, "fc2") == (
        "model fc2 dgrad all_gather_gemm m=8 n=6 k=4 float32 [k,n] tp=2 p2p 2.000 1.990 2.000 1.00x reference"
    )
    assert line(lines, "own").endswith("p2p - - - - fused")


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
