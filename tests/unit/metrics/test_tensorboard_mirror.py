"""The mirror in TensorBoard: what its own reader finds, and that nothing of it ends a training."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flux.metrics.tensorboard_mirror import TensorBoardMirror
from tests.unit.metrics.metrics_records import record, sampled_record


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return [(event.step, round(event.value, 4)) for event in read.Scalars(name)]


def test_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoardMirror(tmp_path) as board:
        board.write(sampled_record(1, flux=True))
        board.write(record(2, mfu=None))
        board.write(record(3))
    assert scalars(tmp_path, "lm loss") == [(1, 4.9), (2, 4.8), (3, 4.7)]
    assert scalars(tmp_path, "mfu") == [(1, 0.4), (3, 0.4)]
    assert scalars(tmp_path, "lm loss validation") == [(1, 5.0)]
    assert len(scalars(tmp_path, "flux/operator_time_ms/all_gather_gemm")) == 1
    with TensorBoardMirror(tmp_path, resumed_from=1) as board:
        board.write(record(2, **{"lm loss": 4.5}))
    assert scalars(tmp_path, "lm loss") == [(1, 4.9), (2, 4.5)], "steps that a resumed run does again"


def test_a_failure_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with TensorBoardMirror(tmp_path / "file" / "board") as board:
        board.write(record(1))
        board.write(record(2))
    (said,) = (entry.getMessage() for entry in caplog.records if entry.name == "megatron_flux")
    assert "TensorBoard is off for the rest of this run, metrics.jsonl goes on" in said
