"""Names of runs in wandb: those of a job, and of a run that is resumed."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.train import config, description
from megatron_flux.train.options import TrainOptions


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ID", "NAME"):
        monkeypatch.delenv(f"SLURM_JOB_{name}", raising=False)


def names(out: Path, *, load: Path | None = None, **options: Any) -> description.WandbNames:
    """Return the names of a run in ``out`` that begins now; its folder is made."""
    run = config.resolve(TrainOptions(load=load, **options), world_size=2, device="cpu", out=out)
    with description.made(run):
        pass
    return description.load_wandb_names(run)


def test_a_job_names_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "4713", "JOB_NAME": "night"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert names(tmp_path / "run").group == "night-4713"
    assert names(tmp_path / "x").group == "night-4713-x"
    for name, value in {"ARRAY_JOB_ID": "4711", "ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for out in (tmp_path / "2" / "run", tmp_path / "rep-2"):
        assert names(out) == ("night-4711", "night-4711_2"), "repetitions are one group"
        assert json.loads((out / "config.json").read_text())["repetition"] == 2


def test_a_resumed_run_keeps_its_names_in_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = names(tmp_path / "x")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert names(tmp_path / "x", load=tmp_path) == first
    # A checkpoint of another folder begins a run of its own.
    assert names(tmp_path / "y", load=tmp_path).group == "job-4711-y"
