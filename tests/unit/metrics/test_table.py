"""The terminal table and the verdict."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from megatron_flux.metrics.summary import summarize, verdict
from megatron_flux.metrics.table import print_summary
from tests.unit.metrics.metrics_records import Record, interleaved

REASON = "column layer: a reason [bold]with markup[/bold] that is longer than eighty columns, " + "and longer " * 10


def comparison(**changes: Any) -> dict[str, Any]:
    arms = interleaved(6, {"baseline": [0.1234] * 6, "flux": [0.1111] * 6})
    for item in arms["flux"]:
        item |= {"peak-memory-bytes": 2**31, "lm loss": item["lm loss"] * (1 + 2e-7), **changes}
    return summarize(arms["baseline"], arms["flux"], {})


def piped(summary: dict[str, Any], encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    with contextlib.redirect_stdout(file):
        print_summary(summary)
    file.flush()
    return raw.getvalue().decode(encoding)


def line(text: str, label: str) -> list[str]:
    return next(item for item in text.splitlines() if item.strip().startswith(label)).strip()[len(label) :].split()


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_piped_has_no_colour_and_no_truncation(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm-256color")
    text = piped(comparison(**{"flux/fallbacks": {REASON: 3}}))
    assert "\x1b" not in text
    assert f"fallback to stock: 3 calls: {REASON}" in text.splitlines()
    table = text.split("largest relative")[0]
    assert all(len(row) <= 80 for row in table.splitlines())
    assert line(text, "step time, median (ms)") == ["123.4", "111.1", "\u221210.0", "%"]
    assert line(text, "step time, p10…p90 (ms)") == ["123.4…123.4", "111.1…111.1"]
    assert line(text, "peak memory") == ["1.00", "GiB", "2.00", "GiB", "+100.0", "%"]
    assert line(text, "peak memory, workspace") == ["0.0", "MiB", "256.0", "MiB"]
    assert line(text, "tokens/s") == ["10,000", "10,000", "0.0", "%"]
    assert line(text, "MFU") == ["40.0", "%", "40.0", "%"]
    assert line(text, "timed steps") == ["18", "18"]
    assert line(text, "loss, first step") == ["4.900000", "4.900001"]
    assert line(text, "active flux layers:") == ["8"]
    assert line(text, "largest relative loss difference:") == ["2.0e-07", "over", "18", "iterations"]
    assert text.splitlines()[-1] == verdict(comparison())


def test_what_stock_was_allowed_to_use_stands_below_the_table() -> None:
    arms = interleaved(1, {"baseline": [0.1], "flux": [0.1]})
    info = {"device": {"kind": "cuda"}}
    assert "both arms: NVLink multicast: not recorded\n" in piped(summarize(arms["baseline"], arms["flux"], info))
    variables = {"NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    arms["baseline"][0]["flux/run"] = {"environment": variables}
    text = piped(summarize(arms["baseline"], arms["flux"], info))
    assert "both arms: NVLink multicast off (NCCL_NVLS_ENABLE 0), CUDA_DEVICE_MAX_CONNECTIONS 1\n" in text
    assert "multicast" not in piped(summarize(arms["baseline"], arms["flux"], {"device": {"kind": "cpu"}}))


def test_unknown_is_a_dash() -> None:
    arms = interleaved(1, {"baseline": [0.1], "flux": [0.1]})
    for item in arms["baseline"] + arms["flux"]:
        item |= {"mfu": None, "peak-memory-bytes": None, "flux/allocated_peak_bytes": None}
    text = piped(summarize(arms["baseline"], arms["flux"], {}))
    assert line(text, "MFU") == ["—", "—"]
    assert line(text, "peak memory") == ["—", "—"]
    assert "workspace" not in text


def test_empty_arms_print() -> None:
    text = piped(summarize([], [], {}))
    assert line(text, "step time, median (ms)") == ["—", "—"]
    assert "note: The flux arm has no records." in text
    assert text.splitlines()[-1].startswith("no comparison")


def test_nan_prints_by_name() -> None:
    text = piped(comparison(**{"lm loss": float("nan")}))
    assert line(text, "loss, last step")[1] == "NaN"
    assert line(text, "largest relative loss difference:")[0] == "NaN"


def test_terminal_without_unicode() -> None:
    text = piped(comparison(**{"flux/fallbacks": {"raison d'être": 1}}), encoding="ascii")
    assert "123.4~123.4" in text
    assert "1 call: raison d'?tre" in text


def verdict_of(pairs: int, times: dict[str, list[float]], change: Record | None = None) -> str:
    arms = interleaved(pairs, times)
    for item in arms["flux"]:
        item |= change or {}
    return verdict(summarize(arms["baseline"], arms["flux"], {}))


@pytest.mark.parametrize(
    ("flux", "expected"),
    [
        ([0.08] * 6, "flux 1.25x (1.25…1.25): faster"),
        ([0.125] * 6, "flux 0.80x (0.80…0.80): slower"),
        ([0.1] * 6, "flux 1.00x (1.00…1.00): no difference measured"),
        ([0.0999] * 6, "flux 1.001x (1.001…1.001): faster"),
        ([0.09, 0.11] * 3, "flux 1.00x (0.91…1.11): no difference measured"),
    ],
)
def test_verdict(flux: list[float], expected: str) -> None:
    assert verdict_of(6, {"baseline": [0.1] * 6, "flux": flux}) == expected


def test_verdict_claims_nothing_without_an_interval() -> None:
    text = verdict_of(1, {"baseline": [0.2], "flux": [0.1]})
    assert text == "flux 2x, no interval: 1 pair of blocks, 6 are needed"


def test_verdict_tells_that_flux_never_ran() -> None:
    text = verdict_of(6, {"baseline": [0.1] * 6, "flux": [0.1] * 6}, {"flux/active_layers": 0})
    assert "no layer ran flux" in text


CPU = {"device": {"kind": "cpu"}}
STOCK = {"flux/fallbacks": {"operators: reference: no GPU": 36}}


def on_cpus(info: dict[str, Any], **changes: Any) -> dict[str, Any]:
    arms = interleaved(6, {"baseline": [0.2] * 6, "flux": [0.1] * 6})
    for item in arms["flux"]:
        item |= changes
    return summarize(arms["baseline"], arms["flux"], info)


@pytest.mark.parametrize(
    ("info", "changes", "said"),
    [
        (CPU, STOCK, "reference: no GPU"),
        ({}, STOCK, "reference: no GPU"),  # of a run folder without config.json
        (CPU, {}, "no GPU"),  # an earlier version's that sampled nothing
        (CPU, {"flux/calls": [{"backend": "reference"}]}, "reference: no GPU"),
        (CPU | {"link": "host"}, {"flux/calls": [{"backend": "chunked"}]}, "chunked (CPU twin, link host): no GPU"),
        (
            CPU | {"link": "host"},
            {"flux/calls": [{"backend": "tuned: chunked"}, {"backend": "tuned: reference"}]},
            "chunked (CPU twin, link host), reference: no GPU",
        ),
    ],
)
def test_without_a_gpu_the_losses_are_all_that_is_judged(
    info: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    summary = on_cpus(info, **changes)
    assert summary["without_gpu"] == said
    assert summary["speedup"] is summary["speedup_ci95"] is None
    assert summary["verdict"] == (
        f"same losses: largest relative difference 0 over 18 steps; no verdict on speed ({said})"
    )
    text = piped(summary)
    assert "+100.0" not in text
    assert line(text, "tokens/s") == ["10,000", "10,000"]
    assert line(text, "step time, median (ms)") == ["200.0", "100.0"]
    assert f"active flux layers: 8 ({said})" in text
    assert text.splitlines()[-1] == summary["verdict"]


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1 + 2e-7, "losses: largest relative difference 2.0e-07"),
        (float("nan"), "losses: largest relative difference NaN"),
    ],
)
def test_losses_that_differ_are_not_called_the_same(factor: float, said: str) -> None:
    arms = interleaved(1, {"baseline": [0.1], "flux": [0.1]})
    arms["flux"][-1]["lm loss"] *= factor
    assert verdict(summarize(arms["baseline"], arms["flux"], CPU)).startswith(
        f"{said} over 3 steps; no verdict on speed (no GPU)"
    )


def test_nothing_is_said_of_losses_that_were_not_compared() -> None:
    baseline = interleaved(1, {"baseline": [0.1], "flux": [0.1]})["baseline"]
    assert verdict(summarize(baseline, [], CPU)) == "no comparison: flux without timed steps"


def test_gpus_are_judged_as_ever() -> None:
    summary = on_cpus({"device": {"kind": "cuda"}, "link": "nvlink"}, **{"flux/calls": [{"backend": "fused"}]})
    assert (summary["without_gpu"], summary["speedup"]) == (None, 2.0)
    assert "no GPU" not in piped(summary)
