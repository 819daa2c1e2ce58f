"""The commands ``report`` and ``watch``: what they write, print and exit with, whatever stands in the files."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.metrics.metrics_records import interleaved, write_run

RESULTS = Path(__file__).parents[3] / "results"
CPU = RESULTS / "report-cpu-tiny"


@pytest.fixture(autouse=True)
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out five megabytes of a library."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


def title(folder: Path) -> str:
    found = re.search("<h1>(.*)</h1>", (folder / "report.html").read_text())
    assert found is not None
    return found[1]


def test_a_jobs_folder_stands_for_its_repetitions(cli: Callable[..., str], tmp_path: Path) -> None:
    """A job's script leaves it so, with logs and checkpoints beside the run folders."""
    root = tmp_path / "runs" / "gpt3-175b-compare-4711"
    for index in (0, 1, 10):
        variants = interleaved(6, {"baseline": [0.1] * 6, "flux": [0.09] * 6})
        write_run(root / f"rep-{index}" / "run", variants, {"config": {"command": "compare", "preset": "tiny"}})
        (root / f"rep-{index}" / "logs" / "0").mkdir(parents=True)
    (root / "rep-2" / "logs").mkdir(parents=True)  # nothing recorded yet
    cli("report", root)
    found = re.findall('<h2 class="chapter">(.*)</h2>', (root / "report.html").read_text())
    assert found == [f"gpt3-175b-compare-4711/rep-{index}" for index in (0, 1, 10)]
    # One repetition alone is a report of its own.
    alone = tmp_path / "runs" / "alone-7"
    shutil.copytree(root / "rep-0", alone / "rep-0")
    cli("report", alone, "--out", tmp_path / "out")
    assert title(tmp_path / "out").startswith("flux 1.1")
    (tmp_path / "runs" / "new" / "rep-0" / "logs").mkdir(parents=True)
    said = cli("report", tmp_path / "runs" / "new", code=2)
    assert "new is not a run folder: it has no records of baseline or flux" in said


def test_bad_input_is_one_line(cli: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, said in (
        (["report", tmp_path / "no"], "no is missing; name a run folder"),
        (["report", tmp_path / "file"], "file is no folder; name a run folder"),
        (["report", RESULTS / "layer-h200x4-nvlink"], "is not a run folder: it has no records of baseline or flux"),
        (["report", CPU, "--out", CPU / "config.json"], "cannot write"),
        (["watch", tmp_path / "no"], "no is missing; name the run folder of a training job"),
    ):
        assert said in cli(*words, code=2)
