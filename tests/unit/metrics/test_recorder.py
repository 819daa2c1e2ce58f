"""The JSONL: on disk at once, strict, resumable without loss, and clear about damage."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.recorder import JsonlRecorder, read_records
from tests.unit.metrics.metrics_records import Record, record


def strictly(text: str) -> Record:
    def refuse(word: str) -> None:
        raise AssertionError(f"bare {word} in JSON")

    return json.loads(text, parse_constant=refuse)


def fill(path: Path, iterations: range, resume_from: int | None = None, **changes: object) -> None:
    with JsonlRecorder(path, resume_from) as recorder:
        for iteration in iterations:
            recorder.write(record(iteration, **changes))


def iterations(path: Path) -> list[int]:
    return [item["iteration"] for item in read_records(path)]


def test_each_record_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "arm" / "metrics.jsonl"
    recorder = JsonlRecorder(path)
    for n in (1, 2, 3):
        recorder.write(record(n))
        # Read through another handle, while the writer has neither flushed nor closed anything itself.
        lines = path.read_bytes().split(b"\n")
        assert len(lines) == n + 1
        assert lines[-1] == b""
        assert strictly(lines[-2].decode())["iteration"] == n
    recorder.close()


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = record(1, flux=True, **{"flux/fallbacks": {'réason "x"\n</script>': 3}, "mfu": None, "own": "NaN"})
    with JsonlRecorder(path) as recorder:
        recorder.write(written)
    assert read_records(path) == [written]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_is_strict_json_and_comes_back(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 2), **{"lm loss": value})
    assert isinstance(strictly(path.read_text())["lm loss"], str)
    assert read_records(path)[0]["lm loss"] == pytest.approx(value, nan_ok=True)


def test_wrong_record_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlRecorder(path) as recorder:
        recorder.write(record(1))
        wrong = record(2)
        del wrong["grad-norm"]
        with pytest.raises(ValueError, match="'grad-norm' is missing"):
            recorder.write(wrong)
        with pytest.raises(ValueError, match="iteration 1 after iteration 1"):
            recorder.write(record(1))
    assert iterations(path) == [1]


def test_resume_moves_later_records_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 6), **{"lm loss": 7.0})
    before = path.read_bytes().splitlines(keepends=True)
    with caplog.at_level(logging.WARNING, logger="megatron_flux"):
        fill(path, range(4, 8), resume_from=3, **{"lm loss": 6.0})
    assert iterations(path) == [1, 2, 3, 4, 5, 6, 7]
    assert [item["lm loss"] for item in read_records(path)] == [7.0] * 3 + [6.0] * 4
    assert (tmp_path / "metrics.jsonl.superseded-1").read_bytes() == b"".join(before[3:])
    assert "2 earlier records moved" in caplog.text


def test_second_resume_keeps_the_first_superseded_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4))
    fill(path, range(3, 5), resume_from=2)
    fill(path, range(2, 3), resume_from=1)
    assert iterations(path) == [1, 2]
    assert iterations(tmp_path / "metrics.jsonl.superseded-1") == [3]
    assert iterations(tmp_path / "metrics.jsonl.superseded-2") == [2, 3, 4]


@pytest.mark.parametrize("resume_from", [2, 3])
@pytest.mark.parametrize("torn", ['{"iteration": 3, "lm l', json.dumps(record(3))], ids=["cut", "newline missing"])
def test_resume_after_a_torn_line(tmp_path: Path, torn: str, resume_from: int) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 3))
    with path.open("a") as file:
        file.write(torn)
    fill(path, range(4, 6), resume_from=resume_from)
    assert iterations(path) == [1, 2, 4, 5]
    assert (tmp_path / "metrics.jsonl.superseded-1").read_text() == torn


def test_resume_with_nothing_later_moves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4))
    fill(path, range(4, 5), resume_from=3)
    assert iterations(path) == [1, 2, 3, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_past_the_end_says_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 3))
    with caplog.at_level(logging.WARNING, logger="megatron_flux"):
        fill(path, range(6, 7), resume_from=5)
    assert "ends at iteration 2, training resumes after 5" in caplog.text
    assert iterations(path) == [1, 2, 6]


def test_new_run_moves_an_earlier_one_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4))
    fill(path, range(1, 2))
    assert iterations(path) == [1]
    assert iterations(tmp_path / "metrics.jsonl.superseded-1") == [1, 2, 3]


def test_torn_last_line_is_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING, logger="megatron_flux"):
        assert iterations(path) == [1, 2]
    assert f"{path}:3" in caplog.text


def test_empty_file_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert read_records(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "this is a list"),
        (b'{"iteration": 2}', "'lm loss' is missing"),
        (json.dumps(record(2) | {"lm loss": math.nan}).encode(), "NaN is not JSON"),
        (json.dumps(record(2) | {"lm loss": "low"}).encode(), "'low' is not a number"),
        (json.dumps(record(1)).encode(), "iteration 1 after iteration 1"),
        (b"\xff\xfe", "decode"),
        (b"", "Expecting value"),
    ],
)
def test_malformed_line_is_one_line_with_file_and_number(tmp_path: Path, line: bytes, cause: str) -> None:
    path = tmp_path / "metrics.jsonl"
    fill(path, range(1, 2))
    path.write_bytes(path.read_bytes() + line + b"\n" + json.dumps(record(3)).encode() + b"\n")
    with pytest.raises(UserError) as caught:
        read_records(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ")
    assert cause in message
    assert "remove or repair" in message
    assert "\n" not in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*No such file"):
        read_records(tmp_path / "metrics.jsonl")


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write metrics"):
        JsonlRecorder(tmp_path / "file" / "metrics.jsonl")


def test_closed_on_exit_and_twice(tmp_path: Path) -> None:
    with JsonlRecorder(tmp_path / "metrics.jsonl") as recorder:
        pass
    recorder.close()
    with pytest.raises(ValueError, match="closed"):
        recorder.write(record(1))
