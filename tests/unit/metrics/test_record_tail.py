"""Records of a file that grows, is replaced, or is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import MAX_PROBLEMS, JsonlRecorder, RecordTail
from tests.unit.metrics.metrics_records import record, sampled_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flux" / "metrics.jsonl"


def polled(tail: RecordTail) -> int:
    """How many records came."""
    before = len(tail.records)
    tail.poll()
    return len(tail.records) - before


def test_a_file_that_is_not_there_yet_and_grows(path: Path) -> None:
    tail = RecordTail(path)
    assert polled(tail) == 0
    with JsonlRecorder(path) as recorder:
        recorder.write(sampled_record(1))
        assert polled(tail) == 1
        assert polled(tail) == 0
        recorder.write(record(2, **{"lm loss": float("nan")}))
        recorder.write(record(3))
        assert polled(tail) == 2
    assert [item["iteration"] for item in tail.records] == [1, 2, 3]
    assert tail.records[1]["lm loss"] != tail.records[1]["lm loss"]
    assert tail.problems() == []


def test_half_a_line_waits_for_the_other_half(path: Path) -> None:
    line = strict_json.dumps(record(1)).encode() + b"\n"
    path.parent.mkdir()
    path.write_bytes(line[:40])
    tail = RecordTail(path)
    assert polled(tail) == 0
    assert tail.problems(ended=False) == []
    assert tail.problems() == ["line 1 is cut off and left out (its writer was killed)"]
    with path.open("ab") as file:
        file.write(line[40:])
    assert polled(tail) == 1
    assert tail.problems() == []


def test_resume_replaces_the_file(path: Path) -> None:
    with JsonlRecorder(path) as recorder:
        for n in range(1, 6):
            recorder.write(record(n))
    tail = RecordTail(path)
    tail.poll()
    with JsonlRecorder(path, resume_from=2) as recorder:
        recorder.write(record(3))
        tail.poll()
        assert len(tail.records) == 3
    assert [item["iteration"] for item in tail.records] == [1, 2, 3]


def test_damaged_lines_are_left_out_and_counted(path: Path) -> None:
    good = [strict_json.dumps(record(n)) for n in (1, 2, 3)]
    bad = ["{", "[]", "\x00", good[0], *["NaN"] * MAX_PROBLEMS]
    path.parent.mkdir()
    path.write_text("\n".join([good[0], *bad, good[1], good[2]]) + "\n")
    tail = RecordTail(path)
    assert polled(tail) == 3
    said = tail.problems()
    assert len(said) == MAX_PROBLEMS + 1
    assert said[0].startswith("line 2 is damaged and left out (")
    assert "iteration 1 after iteration 1" in said[3]
    assert said[-1] == f"{len(bad) - MAX_PROBLEMS} further damaged lines are left out"
