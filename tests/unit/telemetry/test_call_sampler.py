"""Overlap by sampled calls, and when it is unknown: the baseline must be of the step's state. Traces on a full disk."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_flux.ops.call_events import Call, Times
from megatron_flux.telemetry.call_sampler import FASTER, NO_CLOCK, NO_OVERLAP, OTHER_CLOCK, Baseline, overlap
from megatron_flux.telemetry.profiler import StepProfiler
from tests.small_disk import fill, small_disk

GROUP: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="0")


def found(taken: float, baseline: Baseline, clock: float | None, device: str = "cuda") -> dict[str, Any]:
    shape: dict[str, Any] = {"operator": "all_gather_gemm", "m": 8192, "n": 18432, "k": 12288, "transposed": False}
    where: dict[str, Any] = {"device": torch.device(device), "backend": "fused", "group_name": "0", "group": GROUP}
    one = Call(dtype=torch.bfloat16, **shape, **where)
    values = overlap({one: Times(2, 2 * taken)}, {one: baseline}, clock)
    (row,) = values["flux/calls"]
    name = "all_gather_gemm"
    assert values["flux/exposed_communication_ms"][name] == (None if row["withheld"] else 2 * row["exposed_ms"])
    assert values["flux/e_overlap"][name] == row["e_overlap"]
    return row


def test_clocks_must_be_close_for_what_there_is_to_hide() -> None:
    much, little = Baseline(1.0, 2.0, "measured", 1500.0), Baseline(1.0, 1.2, "measured", 1500.0)
    assert found(1.25, much, 1500.0)["e_overlap"] == pytest.approx(0.75)
    assert found(1.25, much, 1640.0)["e_overlap"] == pytest.approx(0.75)
    assert found(1.25, much, 1660.0)["withheld"] == OTHER_CLOCK
    assert found(1.05, little, 1520.0)["e_overlap"] == pytest.approx(0.75)
    assert found(1.05, little, 1540.0)["withheld"] == OTHER_CLOCK
    # Clocks that seem equal may be half a step of NVML's apart.
    assert found(1.01, Baseline(1.0, 1.04, "measured", 1500.0), 1500.0)["withheld"] == OTHER_CLOCK


def test_a_call_as_fast_as_its_gemm_has_hidden_all_and_gained_nothing() -> None:
    row = found(0.95, Baseline(1.0, 2.0, "measured", 1500.0), 1500.0)
    assert (row["exposed_ms"], row["e_overlap"], row["withheld"]) == (0.0, 1.0, None)
    assert found(0.85, Baseline(1.0, 2.0, "measured", 1500.0), 1500.0)["withheld"] == FASTER


def test_unknown_clocks_and_processors() -> None:
    for clock, alone in ((None, 1500.0), (1500.0, None)):
        assert found(1.5, Baseline(1.0, 2.0, "measured", alone), clock)["withheld"] == NO_CLOCK
    for gemm in (1.0, 0.0):  # 0: of a plain gather
        row = found(1.5, Baseline(gemm, 2.0, "measured"), None, "cpu")
        assert (row["exposed_ms"], row["e_overlap"], row["withheld"]) == (None, None, NO_OVERLAP)
        assert (row["time_ms"], row["gemm_ms"], row["serial_ms"]) == (1.5, gemm, 2.0)


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
