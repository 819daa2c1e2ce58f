"""``report --against``: bands, and what may be compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.regression import BANDS, compare, parse_bands
from tests.unit.metrics.report_runs import RESULTS, full_run, full_variants


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of a speed-up takes longest of all, and says nothing here."""
    monkeypatch.setattr("megatron_flux.metrics.summary.RESAMPLES", 20)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_run(tmp_path_factory.mktemp("earlier") / "results")


def changed(folder: Path, variant: str, change: dict[str, Any], **settings: Any) -> Path:
    """A run whose records of one variant differ; a function of the old value, or the new value."""
    variants = full_variants()
    for item in variants[variant]:
        item |= {name: value(item[name]) if callable(value) else value for name, value in change.items()}
    return full_run(folder, variants, **settings)


def test_the_same_run_stays_in_every_band(tmp_path: Path, results: Path) -> None:
    result = compare(full_run(tmp_path / "run"), results, dict.fromkeys(BANDS, 0.0))
    assert not result.outside
    assert result.verdict == "against results: 6 of 6 quantities within their bands"


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"iteration-time": lambda s: 1.06 * s}, "flux step time, median (ms)"),
        ({"iteration-time": lambda s: 1.04 * s}, None),
        ({"iteration-time": lambda s: 0.5 * s}, None),
        ({"lm loss": lambda loss: 1.011 * loss}, "flux loss over 18 iterations"),
        ({"lm loss": lambda loss: 0.989 * loss}, "flux loss over 18 iterations"),
        ({"lm loss": lambda loss: 1.009 * loss}, None),
        ({"lm loss": math.nan}, "flux loss over 18 iterations"),
        ({"peak-memory-bytes": lambda size: int(1.06 * size)}, "flux peak memory"),
        ({"peak-memory-bytes": lambda size: size // 2}, None),
    ],
)
def test_bands(tmp_path: Path, results: Path, change: dict[str, Any], quantity: str | None) -> None:
    result = compare(changed(tmp_path / "run", "flux", change), results)
    assert [one.quantity for one in result.outside] == ([quantity] if quantity else [])
    assert ("1 of 6 quantities outside their bands" in result.verdict) == (quantity is not None)


def test_one_diverged_step_is_enough(tmp_path: Path, results: Path) -> None:
    variants = full_variants()
    variants["baseline"][9]["lm loss"] = math.inf
    (one,) = compare(full_run(tmp_path / "run", variants), results).outside
    assert one.quantity == "baseline loss over 18 iterations"


def test_unknown_memory_is_not_checked(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("peak-memory-bytes", "flux/allocated_peak_bytes"))
    runs = [changed(tmp_path / name, "flux", unknown) for name in ("run", "results")]
    result = compare(*runs)
    assert [one.state for one in result.checked if one.quantity == "flux peak memory"] == ["not checked"]
    assert result.verdict.startswith("against results: 5 of 5")
    variants = {variant: [item | unknown for item in items] for variant, items in full_variants().items()}
    none = full_run(tmp_path / "none", variants)
    with pytest.raises(UserError, match="nothing of memory is known in both"):
        compare(none, none, {"memory": 0.05})


@pytest.mark.parametrize(
    ("settings", "checks", "said"),
    [
        ({"shape": {"hidden_size": 128}}, "loss", "shape.hidden_size 128 and 64"),
        ({"tp": 4}, "step-time", "tp 4 and 2; give results of the same settings, or a --band of loss alone"),
        ({"padded_vocab_size": 512}, "loss", "padded_vocab_size 512 and 384; give results of the same settings"),
        (
            {"seed": 1},
            "loss",
            "seed 1 and 1234; give results of the same settings, or a --band of step-time, memory alone",
        ),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, results: Path, settings: dict[str, Any], checks: str, said: str
) -> None:
    run = full_run(tmp_path / "run", **settings)
    with pytest.raises(UserError, match=said) as caught:
        compare(run, results, {checks: 0.05})
    assert "\n" not in str(caught.value)
    if "shape" not in settings:  # what is checked alone must be the same
        other = ("loss",) if checks == "step-time" else ("step-time", "memory")
        assert not compare(run, results, dict.fromkeys(other, 0.05)).outside


def test_another_device(tmp_path: Path, results: Path) -> None:
    run = full_run(tmp_path / "run")
    for name in ("config.json", "summary.json"):
        found = json.loads((run / name).read_text())
        found["device"]["name"] = "NVIDIA H100"
        (run / name).write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"device NVIDIA H100 and NVIDIA H200; .*a --band of loss alone"):
        compare(run, results)
    assert not compare(run, results, {"loss": 0.01}).outside


def test_missing_sides_and_steps(tmp_path: Path, results: Path) -> None:
    variants = full_variants()
    with pytest.raises(UserError, match="has no timed step of flux"):
        compare(full_run(tmp_path / "one", {**variants, "flux": []}), results)
    with pytest.raises(UserError, match="has no timed step of flux"):
        compare(changed(tmp_path / "warm", "flux", {"warmup": True}), results)
    late = {
        variant: [item | {"iteration": item["iteration"] + 100} for item in items]
        for variant, items in variants.items()
    }
    with pytest.raises(UserError, match="no iteration of baseline in common"):
        compare(full_run(tmp_path / "late", late), results)
    with pytest.raises(UserError, match="layer-h200x4-nvlink is a benchmark"):
        compare(results, RESULTS / "layer-h200x4-nvlink")


def test_words_for_bands() -> None:
    assert parse_bands(["loss=2", "step-time=10"]) == {"loss": 0.02, "step-time": 0.1}
    for word in ("loss", "speed=1", "loss=-1", "loss=nan"):
        with pytest.raises(UserError, match="give NAME=PER_CENT, the name one of step-time, loss, memory"):
            parse_bands([word])
