"""The verdict of a comparison, and what is printed without a GPU."""

from typing import Any

import pytest

from megatron_flux.metrics.summary import summarize, verdict
from megatron_flux.metrics.table import print_summary
from tests.unit.metrics.metrics_records import interleaved

CPU = {"device": {"kind": "cpu"}}
STOCK = {"flux/fallbacks": {"operators: reference: no GPU": 36}}


def comparison(info: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    variants = interleaved(6, {"baseline": [0.1234] * 6, "flux": [0.1111] * 6})
    for item in variants["flux"]:
        item |= {"peak-memory-bytes": 2**31, **changes}
    return summarize(variants["baseline"], variants["flux"], info or {})


@pytest.mark.parametrize(
    ("flux", "expected"),
    [
        ([0.08] * 6, "flux 1.25x (1.25…1.25): faster"),
        ([0.125] * 6, "flux 0.80x (0.80…0.80): slower"),
        ([0.1] * 6, "flux 1.00x (1.00…1.00): no difference measured"),
        ([0.0999] * 6, "flux 1.001x (1.001…1.001): faster"),
        ([0.09, 0.11] * 3, "flux 1.00x (0.91…1.11): no difference measured"),
        ([0.05], "flux 2x, no interval: 1 pair of blocks, 6 are needed"),
    ],
)
def test_verdict(flux: list[float], expected: str) -> None:
    variants = interleaved(len(flux), {"baseline": [0.1] * len(flux), "flux": flux})
    assert verdict(summarize(variants["baseline"], variants["flux"], {})) == expected


def test_verdict_tells_what_was_not_compared() -> None:
    assert "no layer ran flux" in comparison(**{"flux/active_layers": 0})["verdict"]
    patched = interleaved(1, {"baseline": [0.1], "flux": [0.1]})["flux"]
    summary = summarize(patched, patched, {})
    assert summary["baseline_is_stock"] is False
    assert "baseline ran flux" in summary["verdict"]


@pytest.mark.parametrize(
    ("info", "changes", "said"),
    [
        (CPU, STOCK, "reference: no GPU"),
        (
            CPU | {"link": "host"},
            {"flux/calls": [{"backend": "tuned: chunked"}, {"backend": "tuned: reference"}]},
            "chunked (CPU twin, link host), reference: no GPU",
        ),
    ],
)
def test_without_a_gpu_only_losses_are_judged(
    info: dict[str, Any], changes: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = comparison(info, **changes)
    assert summary["without_gpu"] == said
    assert summary["speedup"] is summary["speedup_ci95"] is None
    assert summary["verdict"] == (
        f"same losses: largest relative difference 0 over 18 steps; no verdict on speed ({said})"
    )
    print_summary(summary)
    text = capsys.readouterr().out
    assert "+100.0" not in text
    assert f"active flux layers: 8 ({said})" in text
