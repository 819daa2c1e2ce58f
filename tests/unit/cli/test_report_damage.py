"""Whatever stands in the files of a run folder, a report is a page or one line, never a stack trace."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.report import make_chapters, page
from megatron_flux.metrics.report.run import load
from tests.unit.metrics.report_runs import RESULTS, full_run

SEED = 0
WRONG = [None, True, -1, 1e309, "x", "NaN", [], [None], {}, {"x": None}, "<b>&"]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def damaged(value: Any, rng: random.Random) -> Any:
    """A copy in which something is of another type, or gone."""
    value = copy.deepcopy(value)
    at = rng.choice(list(places(value))[1:])
    inner = value
    for key in at[:-1]:
        inner = inner[key]
    if rng.random() < 0.3:
        del inner[at[-1]]
    else:
        inner[at[-1]] = rng.choice(WRONG)
    return value


def shown(folder: Path) -> str | None:
    """The report as text, or None when it was refused in one line."""
    try:
        chapters, title = make_chapters([load(folder)])
    except UserError as error:
        message = str(error)
    else:
        return page.html(chapters, title)
    assert "\n" not in message
    return None


@pytest.fixture(autouse=True)
def quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without plotly's five megabytes and the interval of the speed-up, each two hundred times."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    monkeypatch.setattr("megatron_flux.metrics.summary.RESAMPLES", 20)


@pytest.mark.parametrize("name", ["config.json", "summary.json", "flux/breakdown.json"])
def test_files_of_a_comparison(tmp_path: Path, name: str) -> None:
    run = full_run(tmp_path / "run")
    rng = random.Random(SEED)
    before = json.loads((run / name).read_text())
    for _ in range(20):
        (run / name).write_text(json.dumps(damaged(before, rng)))
        assert shown(run) is not None


def test_records(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    rng = random.Random(SEED)
    file = run / "flux" / "metrics.jsonl"
    before = [json.loads(line) for line in file.read_text().splitlines()]
    for _ in range(30):
        lines = [json.dumps(damaged(record, rng)) if rng.random() < 0.5 else json.dumps(record) for record in before]
        file.write_text("\n".join(lines) + "\n")
        assert shown(run) is not None


@pytest.mark.parametrize("name", ["ops-h200x4-nvlink/m8192", "layer-h200x4-nvlink"])
def test_benchmarks(tmp_path: Path, name: str) -> None:
    run = shutil.copytree(RESULTS / name, tmp_path / "run", ignore=shutil.ignore_patterns("*.gz"))
    rng = random.Random(SEED)
    before = json.loads((run / "summary.json").read_text())
    pages = 0
    for _ in range(40):
        (run / "summary.json").write_text(json.dumps(damaged(before, rng)))
        pages += shown(run) is not None
    assert pages > 15
