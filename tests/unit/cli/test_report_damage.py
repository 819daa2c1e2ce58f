"""Whatever stands in the files of a run folder, a report is a page or one line, never a stack trace."""

import contextlib
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.report import make_chapters, page
from megatron_flux.metrics.report.run import load_all
from tests.unit.metrics.report_runs import full_run

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


@pytest.mark.parametrize("name", ["config.json", "summary.json", "flux/breakdown.json", "flux/metrics.jsonl"])
def test_damage_is_a_page_or_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Without plotly's five megabytes and the interval of the speed-up, each a hundred times.
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    monkeypatch.setattr("megatron_flux.metrics.summary.RESAMPLES", 20)
    run = full_run(tmp_path / "run")
    file = run / name
    rng, before, pages = random.Random(0), [json.loads(line) for line in jsons(file)], 0
    for _ in range(10):
        wrong = [damaged(one, rng) if len(before) == 1 or rng.random() < 0.5 else one for one in before]
        file.write_text("".join(json.dumps(one) + "\n" for one in wrong))
        with contextlib.suppress(UserError):
            pages += bool(page.html(*make_chapters(load_all([run]))))
    assert pages == 10


def jsons(file: Path) -> list[str]:
    text = file.read_text()
    return text.splitlines() if file.suffix == ".jsonl" else [text]
