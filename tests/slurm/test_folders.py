"""Folders of jobs: collected with their repetitions side by side, and described while they run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.run import folder
from megatron_flux.slurm import status
from megatron_flux.slurm.status import collect
from tests.unit.metrics.metrics_records import interleaved, write_run

INFO = {"config": {"steps": 12}, "link": "nvlink", "versions": {}, "device": {}, "layout": {}, "command": "x"}


def repetition(root: Path, index: int, flux_seconds: float, state: str | None) -> Path:
    run = root / f"rep-{index}" / "run"
    write_run(run, interleaved(4, {"baseline": [0.2] * 4, "flux": [flux_seconds] * 4}), INFO)
    (root / f"rep-{index}" / "logs" / "0").mkdir(parents=True)
    if state is not None:
        folder.write_ended(run, state, {"baseline": 12, "flux": 12})
    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "gpt3-175b-compare-4711"


def test_repetitions_side_by_side(root: Path) -> None:
    repetition(root, 0, 0.16, "finished")
    repetition(root, 1, 0.20, "finished")
    repetition(root, 10, 0.10, "finished")
    (repetition(root, 2, 0.02, "stopped") / "summary.json").unlink()
    found = collect(root)
    assert [one["index"] for one in found["repetitions"]] == ["0", "1", "2", "10"]
    assert [one["speedup"] for one in found["repetitions"]] == pytest.approx([1.25, 1.0, 10.0, 2.0])
    # What was stopped is shown and does not count.
    assert found["speedup_median"] == pytest.approx(1.25)
    assert (found["speedup_min"], found["speedup_max"]) == pytest.approx((1.0, 2.0))
    assert found == json.loads((root / "collected.json").read_text())
    text = (root / "collected.md").read_text()
    assert "| 0 | finished | 1 | 200.0 | 160.0 | 1.250 |" in text
    assert "| 2 | stopped | 1 |" in text
    assert "median 1.250 (1.000…2.000)" in text
    for one in found["repetitions"]:
        assert "plotly" in (root / one["report"]).read_text()
    assert not (root / "rep-2" / "run" / "summary.json").exists(), "figures of half a run are not its summary"


def test_how_far_a_run_has_come(root: Path) -> None:
    run = repetition(root, 3, 0.2, None)
    with (run / "flux" / "metrics.jsonl").open("a") as record:
        record.write('{"iteration": 99, "lm lo')  # being written
    (found,) = status.repetitions(root)
    assert found.iterations == {"baseline": 12, "flux": 12}
    assert (found.index, found.steps, found.state, found.starts) == ("3", 12, "not ended", 1)


def test_nothing_to_collect_is_said(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder of a job"):
        collect(tmp_path)
    root.mkdir(parents=True)
    with pytest.raises(UserError, match="has no records yet"):
        collect(root)


def test_without_slurm_it_is_said(monkeypatch: pytest.MonkeyPatch, cli: Callable[..., str], tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = cli("slurm", "submit", "--profile", "local", "--job", "tiny", code=2)
    assert said.startswith("sbatch is not on this machine")
