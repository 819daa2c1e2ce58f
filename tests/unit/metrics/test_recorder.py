"""The JSONL: on disk at once, strict, resumable without loss, followed while it grows, and clear about damage."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import StorageError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import JsonlRecorder, RecordTail, read_records
from tests import small_disk
from tests.unit.metrics.metrics_records import record, sampled_record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flux" / "metrics.jsonl"


def fill(path: Path, iterations: range, resume_from: int | None = None, **changes: object) -> None:
    with JsonlRecorder(path, resume_from) as recorder:
        for iteration in iterations:
            recorder.write(record(iteration, **changes))


def iterations(path: Path) -> list[int]:
    return [item["iteration"] for item in read_records(path)]


def superseded(path: Path, number: int) -> Path:
    return path.with_name(f"metrics.jsonl.superseded-{number}")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 2.5])
def test_round_trip(path: Path, loss: float) -> None:
    written = sampled_record(
        1, flux=True, **{"flux/fallbacks": {'réason "x"\n</script>': 3}, "mfu": None, "own": "NaN"}
    )
    with JsonlRecorder(path) as recorder:
        recorder.write(written | {"lm loss": loss})
    (read,) = read_records(path)
    assert read.pop("lm loss") == pytest.approx(loss, nan_ok=True)
    assert read == {name: value for name, value in written.items() if name != "lm loss"}
    strict_json.loads(path.read_text())  # refuses bare NaN


@pytest.mark.parametrize(
    ("iteration", "name", "value"),
    [
        (2, "grad-norm", None),
        (2, "flux/fallbacks", {"reason": -1}),
        (1, "own", 1),  # not later than the last
    ],
)
def test_wrong_record_is_refused_and_leaves_no_trace(path: Path, iteration: int, name: str, value: Any) -> None:
    with JsonlRecorder(path) as recorder:
        recorder.write(record(1))
        with pytest.raises(ValueError, match=f"^'{name}': |iteration 1 after iteration 1"):
            recorder.write(record(iteration) | {name: value})
    assert iterations(path) == [1]


def test_resume_moves_later_records(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path, range(1, 6), **{"lm loss": 7.0})
    before = path.read_bytes().splitlines(keepends=True)
    with caplog.at_level(logging.WARNING, logger="megatron_flux"):
        fill(path, range(4, 8), resume_from=3, **{"lm loss": 6.0})
    assert iterations(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [item["lm loss"] for item in read_records(path)] == [7.0] * 3 + [6.0] * 4
    assert superseded(path, 1).read_bytes() == b"".join(before[3:])
    assert "2 earlier records moved" in caplog.text
    fill(path, range(3, 4), resume_from=2)
    assert iterations(superseded(path, 2)) == [3, 4, 5, 6, 7]
    # A run that is not resumed begins anew.
    fill(path, range(1, 2))
    assert iterations(path) == [1]
    assert iterations(superseded(path, 3)) == [1, 2, 3]


@pytest.mark.parametrize("resume_from", [2, 3])
@pytest.mark.parametrize("torn", ['{"iteration": 3, "lm l', json.dumps(record(3))], ids=["cut", "newline missing"])
def test_resume_after_a_torn_line(path: Path, torn: str, resume_from: int) -> None:
    fill(path, range(1, 3))
    with path.open("a") as file:
        file.write(torn)
    fill(path, range(4, 6), resume_from=resume_from)
    assert iterations(path) == [1, 2, 4, 5]
    assert superseded(path, 1).read_text() == torn


def polled(tail: RecordTail) -> int:
    tail.poll()
    return len(tail.records)


def test_a_file_is_followed(path: Path) -> None:
    tail = RecordTail(path)
    assert polled(tail) == 0
    with JsonlRecorder(path) as recorder:
        recorder.write(record(1))
        assert polled(tail) == polled(tail) == 1
        recorder.write(record(2))
        recorder.write(record(3))
    line = strict_json.dumps(record(4)).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line[:40])
    assert polled(tail) == 3
    assert tail.problems(ended=False) == []
    assert tail.problems() == ["line 4 is cut off and skipped (its writer was killed)"]
    with path.open("ab") as file:
        file.write(line[40:])
    assert polled(tail) == 4
    assert tail.problems() == []
    # A resumed run replaces the file.
    fill(path, range(3, 4), resume_from=2)
    tail.poll()
    assert [item["iteration"] for item in tail.records] == [1, 2, 3]


def test_damaged_lines_are_skipped_and_counted(path: Path) -> None:
    good = [strict_json.dumps(record(n)) for n in (1, 2, 3)]
    bad = [good[0], "{", "[]", "\x00", "NaN"]
    path.parent.mkdir()
    path.write_text("\n".join([good[0], *bad, good[1], good[2]]) + "\n")
    tail = RecordTail(path)
    assert polled(tail) == 3
    assert tail.problems() == ["line 2 is damaged and skipped (iteration 1 after iteration 1), and 4 more"]


def test_the_record_says_that_the_disk_is_full(tmp_path: Path) -> None:
    """It is a StorageError: jobs are not retried on other nodes after it."""
    with small_disk.small_disk(tmp_path / "disk", 1) as disk, JsonlRecorder(disk / "metrics.jsonl") as recorder:
        recorder.write(record(1))
        small_disk.fill(disk)
        with pytest.raises(StorageError, match=r"metrics.jsonl takes no more after iteration \d+: No space left"):
            any(recorder.write(record(iteration)) for iteration in range(2, 1000))
