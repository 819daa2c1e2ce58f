"""Profiling some steps: what a trace that cannot be written costs."""

import tempfile
from pathlib import Path

import pytest
import torch

from megatron_flux.telemetry.profiler import StepProfiler
from tests.small_disk import fill, small_disk


@pytest.mark.parametrize("full", ["temporary", "run"])
def test_a_full_disk_costs_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    with small_disk(tmp_path / "disk", 0.02) as disk:
        fill(disk)
        if full == "temporary":
            monkeypatch.setattr(tempfile, "tempdir", str(disk))
        folder = tmp_path / "arm" if full == "temporary" else disk / "arm"
        profiler = StepProfiler(2, 3, folder, rank=1, device=torch.device("cpu"))
        for iteration in range(1, 6):
            with profiler.step(iteration):
                torch.ones(8) + iteration
        profiler.close()
        assert not list(folder.glob("trace/*"))
    (said,) = (record.getMessage() for record in caplog.records if record.name == "megatron_flux")
    assert said.startswith("rank 1 has no trace, and training goes on: ")
    assert said.endswith(f"; is there room in {folder} and {tempfile.gettempdir() if full == 'run' else disk}?")
