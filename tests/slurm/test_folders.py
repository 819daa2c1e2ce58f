"""Folders of jobs: how far their repetitions are, and what they have found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.run import folder
from megatron_flux.slurm import queue, status
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


def test_what_repetitions_have_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repetition(root, 0, 0.16, "finished")
    repetition(root, 1, 0.20, "finished")
    repetition(root, 10, 0.10, "finished")
    repetition(root, 2, 0.02, "stopped")
    monkeypatch.setattr(queue, "job_states", lambda job: queue.JobStates(states={}, source="unknown"))
    shown = "\n".join(status.describe(root, 0.0))
    assert "flux 1.25x, no interval: " in shown
    assert f"largest relative loss difference 0; see {root}/rep-0/run/report.html" in shown
    assert "flux 10x" not in shown, "half a run has found nothing"
    assert shown.endswith("speed-up of the 3 finished repetitions: median 1.250 (1.000…2.000)")


def test_how_far_a_run_has_come(root: Path) -> None:
    run = repetition(root, 3, 0.2, None)
    with (run / "flux" / "metrics.jsonl").open("a") as record:
        record.write('{"iteration": 99, "lm lo')  # being written
    (found,) = status.repetitions(root)
    assert found.iterations == {"baseline": 12, "flux": 12}
    assert (found.index, found.steps, found.state, found.starts) == ("3", 12, "not ended", 1)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder of a job"):
        status.describe(tmp_path, 0.0)


def test_without_slurm_it_is_said(monkeypatch: pytest.MonkeyPatch, cli: Callable[..., str], tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    said = cli("slurm", "submit", "--profile", "local", "--job", "tiny", code=2)
    assert said.startswith("sbatch is not on this machine")
