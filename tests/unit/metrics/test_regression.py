"""``report --against``: bands, what may be compared, and the exit code."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.regression import Bands, Result, compare, parse_checks
from tests.unit.metrics.metrics_records import Record
from tests.unit.metrics.report_runs import RESULTS, full_arms, full_run

LAYERS = RESULTS / "layer-h200x4-nvlink"


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval of a speed-up takes longest of all, and says nothing here."""
    monkeypatch.setattr("megatron_flux.metrics.summary.RESAMPLES", 20)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_run(tmp_path_factory.mktemp("earlier") / "results")


def changed(folder: Path, arm: str, change: dict[str, Any], **settings: Any) -> Path:
    """A run whose records of one arm differ; a function of the old value, or the new value."""
    arms = full_arms()
    for item in arms[arm]:
        item |= {name: value(item[name]) if callable(value) else value for name, value in change.items()}
    return full_run(folder, arms, **settings)


def left(result: Result) -> list[str]:
    return [one.quantity for one in result.left]


def test_the_same_run_stays_in_every_band(tmp_path: Path, results: Path) -> None:
    result = compare(full_run(tmp_path / "run"), results, Bands(0, 0, 0))
    assert not result.left
    assert result.verdict == "against results: 6 of 6 quantities within their bands"


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"iteration-time": lambda s: 1.06 * s}, "flux step time, median (ms)"),
        ({"lm loss": lambda loss: 1.011 * loss}, "flux loss over 18 iterations"),
        ({"lm loss": lambda loss: 0.989 * loss}, "flux loss over 18 iterations"),
        ({"lm loss": math.nan}, "flux loss over 18 iterations"),
        ({"peak-memory-bytes": lambda size: int(1.06 * size)}, "flux peak memory"),
    ],
)
def test_what_leaves_its_band(tmp_path: Path, results: Path, change: dict[str, Any], label: str) -> None:
    result = compare(changed(tmp_path / "run", "flux", change), results, Bands())
    assert left(result) == [label]
    assert "1 of 6 quantities left their bands" in result.verdict
    assert label in result.verdict


@pytest.mark.parametrize(
    "change",
    [
        {"iteration-time": lambda s: 1.04 * s},
        {"iteration-time": lambda s: 0.5 * s},
        {"lm loss": lambda loss: 1.009 * loss},
        {"peak-memory-bytes": lambda size: size // 2},
    ],
)
def test_what_does_not(tmp_path: Path, results: Path, change: dict[str, Any]) -> None:
    assert not compare(changed(tmp_path / "run", "flux", change), results, Bands()).left


def test_one_diverged_step_is_enough(tmp_path: Path, results: Path) -> None:
    arms = full_arms()
    arms["baseline"][9]["lm loss"] = math.inf
    assert left(compare(full_run(tmp_path / "run", arms), results, Bands())) == ["baseline loss over 18 iterations"]


def test_unknown_memory_is_not_checked(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("peak-memory-bytes", "flux/allocated_peak_bytes"))
    runs = [changed(tmp_path / name, "flux", unknown) for name in ("run", "results")]
    result = compare(*runs, Bands())
    assert [one.state for one in result.checked if one.quantity == "flux peak memory"] == ["not checked"]
    assert result.verdict.startswith("against results: 5 of 5")
    arms = {arm: [item | unknown for item in items] for arm, items in full_arms().items()}
    none = full_run(tmp_path / "none", arms)
    with pytest.raises(UserError, match="nothing of memory is known in both"):
        compare(none, none, Bands(), ("memory",))


def earlier(folder: Path, arms: tuple[str, ...] = ("baseline", "flux"), **settings: Any) -> Path:
    """A run whose records are of schema 2: the peak of torch's allocator in the whole process."""
    records = {arm: items if arm in arms else [] for arm, items in full_arms().items()}
    for item in (item for items in records.values() for item in items):
        item |= {"schema": 2, "peak-memory-bytes": 2**40 if len(arms) == 2 else 3 * 2**28}
        del item["flux/allocated_peak_bytes"], item["flux/workspace_bytes"]
    return full_run(folder, records, **settings)


def test_memory_of_earlier_comparisons_is_not_that_of_an_arm(tmp_path: Path) -> None:
    run, then = full_run(tmp_path / "run"), earlier(tmp_path / "then")
    result = compare(run, then, Bands())
    assert [one.state for one in result.checked if "memory" in one.quantity] == ["not checked"] * 2
    assert any(re.match("then: Peak memory of the flux arm .*the other arm's memory is", note) for note in result.notes)
    with pytest.raises(UserError, match="the other arm's memory is in it, flux's workspaces are not; give results"):
        compare(run, then, Bands(), ("memory",))


def test_memory_of_earlier_trainings_is_compared_with_what_was_allocated(tmp_path: Path) -> None:
    then = earlier(tmp_path / "then", ("flux",), command="train")
    memory = [one for one in compare(full_run(tmp_path / "run"), then, Bands()).checked if "memory" in one.quantity]
    assert [(one.quantity, one.then, one.now) for one in memory] == [
        ("flux peak memory, allocated alone", "768.0 MiB", "768.0 MiB")
    ]
    then = earlier(tmp_path / "stock", ("baseline",), command="train")
    memory = [one for one in compare(full_run(tmp_path / "other"), then, Bands()).checked if "memory" in one.quantity]
    assert [(one.quantity, one.then, one.now) for one in memory] == [("baseline peak memory", "768.0 MiB", "1.00 GiB")]


@pytest.mark.parametrize(
    ("settings", "checks", "said"),
    [
        ({"shape": {"hidden_size": 128}}, "loss", "trained different models"),
        ({"tp": 4}, "step-time", "tp 4 and 2; give results of the same settings, or --check loss"),
        ({"padded_vocab_size": 512}, "loss", "padded_vocab_size 512 and 384; give results of the same settings"),
        ({"seed": 1}, "loss", "seed 1 and 1234; give results of the same settings, or --check step-time,memory"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, results: Path, settings: dict[str, Any], checks: str, said: str
) -> None:
    run = full_run(tmp_path / "run", **settings)
    with pytest.raises(UserError, match=said) as caught:
        compare(run, results, Bands(), parse_checks(checks))
    assert "\n" not in str(caught.value)


def test_other_settings_do_not_matter_to_what_is_checked(tmp_path: Path, results: Path) -> None:
    assert not compare(full_run(tmp_path / "run", seed=1), results, Bands(), ("step-time",)).left


def test_graphs_and_no_graphs_are_not_compared_in_time(tmp_path: Path) -> None:
    runs = [full_run(tmp_path / impl, cuda_graph_impl=impl) for impl in ("none", "local")]
    with pytest.raises(UserError, match="cuda_graph_impl none and local; give results of the same settings"):
        compare(*runs, Bands(), ("step-time",))
    assert not compare(*runs, Bands(), ("loss",)).left


def test_another_device(tmp_path: Path, results: Path) -> None:
    run = full_run(tmp_path / "run")
    for name in ("config.json", "summary.json"):
        found = json.loads((run / name).read_text())
        found["device"]["name"] = "NVIDIA H100"
        (run / name).write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"device NVIDIA H100 and NVIDIA H200; .*--check loss"):
        compare(run, results, Bands())
    assert not compare(run, results, Bands(), ("loss",)).left


def test_missing_arm_and_steps(tmp_path: Path, results: Path) -> None:
    arms: dict[str, list[Record]] = full_arms()
    with pytest.raises(UserError, match="has no records of the flux arm"):
        compare(full_run(tmp_path / "one", {**arms, "flux": []}), results, Bands())
    with pytest.raises(UserError, match="has no timed step of the flux arm"):
        compare(changed(tmp_path / "warm", "flux", {"warmup": True}), results, Bands())
    late = {arm: [item | {"iteration": item["iteration"] + 100} for item in items] for arm, items in arms.items()}
    with pytest.raises(UserError, match="no iteration of the baseline arm in common"):
        compare(full_run(tmp_path / "late", late), results, Bands())


def test_checks() -> None:
    assert parse_checks(" loss, memory,loss") == ("loss", "memory")
    for text in ("", "speed", "loss,speed"):
        with pytest.raises(UserError, match="choose some of step-time, loss, memory"):
            parse_checks(text)


def test_benchmarks_are_refused(results: Path) -> None:
    with pytest.raises(UserError, match="layer-h200x4-nvlink is a benchmark"):
        compare(results, LAYERS, Bands())
