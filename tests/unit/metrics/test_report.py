"""report.html: self-contained, escaped and without empty plots; what its chapters say of runs of every kind."""

import json
import math
import re
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from megatron_flux.metrics.report import write_report
from megatron_flux.metrics.report.page import Chapter, Part, html
from megatron_flux.metrics.report.run import Run, load_all
from megatron_flux.metrics.report.training import chapter
from tests.unit.metrics.metrics_records import Record, interleaved, write_run
from tests.unit.metrics.report_runs import full_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028{{ 7 * 7 }}"
INFO: dict[str, Any] = {
    "config": {"preset": "tiny", "optimizer": {"lr": 1e-3}, "data": ["a.txt", "b.txt"], "wandb_api_key": "hunter2"},
    "versions": {"torch": "2.13.0"},
    "command": "megatron-flux compare --preset tiny",
}


def plain_variants(pairs: int = 6) -> dict[str, list[Record]]:
    variants = interleaved(pairs, {"baseline": [0.1] * pairs, "flux": [0.09] * pairs})
    variants["baseline"][0] |= {"warmup": True, "iteration-time": 4.0}
    variants["flux"][0] |= {"warmup": True, "iteration-time": 0.1}
    return variants


@pytest.fixture(autouse=True)
def no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "plotly.js")


def load(folder: Path) -> Run:
    (run,) = load_all([folder])
    return run


def page(folder: Path) -> str:
    return write_report([folder], folder).read_text(encoding="utf-8")


def parts(run: Run) -> dict[str, Part]:
    shown = chapter(run, "run1")
    found = {part.id: part for part in shown.parts}
    assert len(found) == len(shown.parts)
    for part in found.values():
        assert part.figure is None or part.figure.layout.xaxis.title.text, part.id
        assert part.figure is not None or part.rows or part.caption, part.id
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", plain_variants(), INFO)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Part]:
    return parts(load(full_run(tmp_path_factory.mktemp("full") / "run")))


def test_the_page_needs_nothing_but_itself(run: Path) -> None:
    (run / "summary.json").unlink()
    text = page(run)
    # Links go to places of the page itself, each of which is there.
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(re.findall(r'id="([^"]*)"', text))
    assert not re.search(r'(src|srcset|action)=|href="[^#]|url\(|@import|https?:', text)
    assert "default-src 'none'" in text
    assert text.count("plotly.js") == 1
    for expected in (
        *("flux 1.11x (1.11…1.11): faster", "step time, median (ms)", "optimizer.lr", "0.001", "a.txt, b.txt"),
        *("megatron-flux compare --preset tiny", "2.13.0", "fallback to stock", "no summary.json"),
    ):
        assert expected in text, expected
    assert "hunter" not in text


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    variants = plain_variants()
    variants["flux"][-1]["flux/fallbacks"] = {HOSTILE: 2}
    hostile = dict.fromkeys(("device", "command"), HOSTILE) | {"config": {HOSTILE: HOSTILE}}
    text = page(write_run(tmp_path / "a <b>&run", variants, hostile))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert text.count(escape(HOSTILE)) == 5
    figure = go.Figure(go.Bar(name=HOSTILE), layout={"height": 300})
    drawn = html([Chapter("c", "t", "v", "s", [Part("p", "title", figure)])], "title")
    (found,) = re.findall('id="figures">(.*?)</script>', drawn)
    assert json.loads(found)["c-p"]["data"][0]["name"] == HOSTILE


def test_what_is_missing_is_said(full: dict[str, Part], tmp_path: Path) -> None:
    variants = plain_variants()
    for item in variants["baseline"] + variants["flux"]:
        item |= {"lm loss": 3.0}
    variants["flux"][3]["lm loss"] = math.nan
    shown = parts(load(write_run(tmp_path, variants, INFO)))
    assert re.search(r"identical in 17 iterations of 18\..* in 1 iteration", shown["loss-difference"].caption)
    assert "identical in 18 iterations of 18" in shown["grad-norm-difference"].caption
    assert "flux lm loss is not finite in 1 iteration" in shown["loss"].caption
    assert math.isnan(shown["loss"].figure.data[1].y[3])
    sampled = {"Where the time goes", "Overlap efficiency", "Ranks", "Clocks, power and throttling"}
    assert set(dict(shown["missing"].rows)) == sampled
    assert dict(full["findings"].rows)["GPU clocks held down"] == "sw_power_cap in 10, of 10 samples"
    empty = parts(load(write_run(tmp_path / "empty", {"baseline": [], "flux": []}, INFO)))
    assert not [part.id for part in empty.values() if part.figure is not None]
