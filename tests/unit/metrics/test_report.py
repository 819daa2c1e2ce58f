"""report.html: self-contained, escaped, complete, and without empty plots."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics.report import write_report
from megatron_flux.metrics.report.figures import step_times
from megatron_flux.metrics.report.render import DARK, LIGHT, Chapter, Part, html, painted
from megatron_flux.metrics.report.run import load
from megatron_flux.metrics.report.training import chapter
from tests.unit.metrics.metrics_records import Record, interleaved, write_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\u2028{{ 7 * 7 }}"
INFO: dict[str, Any] = {
    "config": {"preset": "tiny", "optimizer": {"lr": 1e-3}, "data": ["a.txt", "b.txt"]},
    "versions": {"torch": "2.13.0"},
    "device": {"name": "cpu"},
    "layout": {"tp": 2},
    "command": "megatron-flux compare --preset tiny",
}


def arms_of(pairs: int = 6) -> dict[str, list[Record]]:
    arms = interleaved(pairs, {"baseline": [0.1] * pairs, "flux": [0.09] * pairs})
    arms["baseline"][0] |= {"warmup": True, "iteration-time": 4.0}
    arms["flux"][0] |= {"warmup": True, "iteration-time": 0.1}
    for item in arms["flux"]:
        item["lm loss"] *= 1 + 1e-7
    return arms


class Page(HTMLParser):
    """Elements with attributes, text outside scripts, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self._into: list[str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._into = {"script": self.scripts, "style": self.styles}.get(tag)
        if self._into is not None:
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is None:
            self.text += data
        else:
            self._into[-1] += data

    @property
    def figures(self) -> dict[str, Any]:
        return {name.removeprefix("run1-"): figure for name, figure in json.loads(self.scripts[0]).items()}


def page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", arms_of(), INFO)


def test_nothing_is_loaded_from_anywhere(run: Path) -> None:
    shown = page(run)
    assert [tag for tag, _ in shown.tags if tag in ("link", "img", "iframe", "object", "base")] == []
    assert [attrs for _, attrs in shown.tags if {"src", "srcset", "action"} & set(attrs)] == []
    # Links go to places of the page itself, each of which is there.
    places = {f"#{attrs['id']}" for _, attrs in shown.tags if "id" in attrs}
    links = [attrs["href"] for _, attrs in shown.tags if "href" in attrs]
    assert links
    assert set(links) <= places
    assert len(shown.scripts) == 3  # figures, plotly.js once, ours
    assert sum("* plotly.js v" in script for script in shown.scripts) == 1
    assert "http" not in shown.scripts[0] + shown.scripts[2] + shown.text
    assert not re.search(r"url\(|@import", shown.styles[0])
    policy = next(attrs["content"] for tag, attrs in shown.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    # Nothing is allowed back in that reaches another machine.
    assert not re.search(r"https?:|\*|'self'|connect-src", policy)


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    arms = arms_of()
    arms["flux"][-1]["flux/fallbacks"] = {HOSTILE: 2}
    hostile = {
        "config": {HOSTILE: HOSTILE, "nested": {"path": HOSTILE}},
        "versions": {"torch": HOSTILE},
        "device": HOSTILE,
        "layout": {"tp": HOSTILE},
        "command": HOSTILE,
    }
    folder = write_run(tmp_path / "a <b>&run", arms, hostile)
    shown = page(folder)
    assert len(shown.scripts) == 3
    assert "img" not in [tag for tag, _ in shown.tags]
    assert not any("onerror" in attrs for _, attrs in shown.tags)
    # config name, its value, nested value, version, device, layout (twice), command, fallback reason
    assert shown.text.count(HOSTILE) == 9
    assert "a <b>&run" in shown.text
    assert not any("alert" in script for script in (shown.scripts[0], shown.scripts[2]))


def test_hostile_strings_in_plot_json_cannot_end_the_script() -> None:
    def scripts(name: Any) -> list[str]:
        figure = {"data": [{"name": name}], "layout": {"height": 1}}
        return Page(html([Chapter("c", "t", "v", "s", [Part("p", "title", figure)])], "title")).scripts

    text = scripts(HOSTILE)[0]
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text)["c-p"]["data"] == [{"name": HOSTILE}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        scripts(math.nan)


def test_content(run: Path) -> None:
    shown = page(run)
    for expected in (
        "flux 1.11x (1.11…1.11): faster",
        "step time, median (ms)",
        "optimizer.lr",
        "0.001",
        "a.txt, b.txt",
        "megatron-flux compare --preset tiny",
        "2.13.0",
        "fallback to stock",
        "Largest relative".lower(),
    ):
        assert expected in shown.text, expected
    assert ("html", {"lang": "en"}) in shown.tags
    assert any(attrs.get("name") == "viewport" for _, attrs in shown.tags)
    assert "prefers-color-scheme: dark" in shown.styles[0]
    assert "@media print" in shown.styles[0]


def test_secrets_in_the_configuration_are_not_shown(tmp_path: Path) -> None:
    config = {"config": {"wandb_api_key": "hunter2", "sub": {"hf_token": "hunter3"}, "tokenizer": "bytes"}}
    text = page(write_run(tmp_path, arms_of(), config)).text
    assert "hunter" not in text
    assert "bytes" in text


def test_each_figure_has_its_place_data_and_units(run: Path) -> None:
    shown = page(run)
    figures = shown.figures
    places = [attrs["id"] for tag, attrs in shown.tags if tag == "div" and attrs.get("class") == "plot"]
    assert places == [f"plot-run1-{name}" for name in figures]
    expected = ["step-times", "loss", "loss-difference", "grad-norm"]
    assert list(figures) == expected
    for name, figure in figures.items():
        go.Figure(figure)  # raises on a name or value that plotly does not know
        assert figure["data"], name
        assert figure["layout"]["xaxis"]["title"]["text"], name
        for trace in figure["data"]:
            assert any(value is not None for value in trace["x"]), name
        for palette in (LIGHT, DARK):
            colours = painted(figure, palette)
            assert "var(" not in json.dumps(colours)
            go.Figure(colours)
    titles = {name: figure["layout"]["yaxis"]["title"]["text"] for name, figure in figures.items()}
    assert titles["step-times"] == "step time (ms)"
    assert titles["loss"] == "lm loss (nat/token)"


def test_step_times_are_in_order_of_execution() -> None:
    figure, caption = step_times(arms_of(2))
    where = {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}
    assert where["baseline"][0] == [2, 3, 10, 11, 12]
    assert where["flux"][0] == [5, 6, 7, 8, 9]
    assert where["baseline, warm-up"] == ([1], [4000.0])
    assert where["flux, warm-up"][0] == [4]
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < 90 < 100 < high < 130
    assert caption.endswith("above the axis: 1.")


def captions(folder: Path) -> dict[str, str]:
    """What stands in place of the figures that are left out."""
    parts = chapter(load(folder), "run1").parts
    gathered = {part.id: list(part.table.rows) for part in parts if part.id == "missing"}
    alone = {part.id: part.caption for part in parts if part.figure is None and part.caption}
    return alone | dict(gathered.get("missing", []))


NOT_RECORDED = {
    "Where the time goes": "--profile-steps",
    "Overlap efficiency per operator": "sampled its operators",
    "Slowest ranks": "sampled its ranks",
    "Clocks, power and throttling": "sampled its GPUs",
}


def test_no_empty_plots_but_a_sentence(tmp_path: Path) -> None:
    missing = captions(write_run(tmp_path, {"baseline": [], "flux": []}, INFO))
    curves = {"loss", "loss-difference", "grad-norm", "grad-norm-difference"}
    assert curves | {"step-times", "operators"} <= set(missing)
    assert all(caption for caption in missing.values())


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    arms = arms_of()
    for item in arms["baseline"] + arms["flux"]:
        item |= {"peak-memory-bytes": None, "lm loss": 3.0}
    arms["flux"][3]["lm loss"] = math.nan
    folder = write_run(tmp_path, arms, INFO)
    expected = {
        "loss-difference": r"identical in 17 iterations of 18\..* in 1 iteration",
        "grad-norm-difference": "identical in 18 iterations of 18",
        "comparison": "on CPUs arms share",
        **NOT_RECORDED,
    }
    found = captions(folder)
    assert set(found) == set(expected)
    assert [name for name, fact in expected.items() if not re.search(fact, found[name])] == []
    shown = page(folder)
    loss = next(trace for trace in shown.figures["loss"]["data"] if trace["name"] == "flux")
    assert loss["y"][3] is None
    assert "flux lm loss is not finite in 1 iteration" in shown.text


def test_missing_arm_is_said_in_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path, {"baseline": arms_of()["baseline"], "flux": []}, INFO)
    (folder / "flux" / "metrics.jsonl").unlink()
    shown = page(folder)
    assert "The flux arm has no records." in shown.text
    assert [trace["name"] for trace in shown.figures["loss"]["data"]] == ["baseline"]


def test_killed_run_is_computed_from_its_records(run: Path) -> None:
    (run / "summary.json").unlink()
    shown = page(run)
    assert "no summary.json" in shown.text
    assert "flux 1.11x" in shown.text
    assert "2.13.0" in shown.text


def test_report_is_replaced_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(run)
    first = path.read_bytes()
    before = sorted(file.name for file in run.iterdir())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_flux.metrics.strict_json.os.replace", fail)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        write_report(run)
    assert path.read_bytes() == first
    assert sorted(file.name for file in run.iterdir()) == before


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder") as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_said_in_the_report(run: Path) -> None:
    (run / "config.json").write_text("{")
    (run / "summary.json").write_text('{"schema_version"')
    (run / "flux" / "breakdown.json").write_text('{"parts": 3}')
    lines = (run / "flux" / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[4] = lines[4][:50] + "\n"
    (run / "flux" / "metrics.jsonl").write_text("".join(lines)[:-20])
    text = page(run).text
    assert "config.json is not JSON" in text
    assert "summary.json is not JSON" in text
    assert "flux/breakdown.json has no parts" in text
    assert "flux/metrics.jsonl: line 5 is damaged and left out" in text
    assert "flux/metrics.jsonl: line 18 is cut off" in text
    assert re.search("18 iterations and flux 16; .* the 16 that both have", text)


def test_a_damaged_configuration_leaves_what_the_summary_knows(run: Path) -> None:
    (run / "config.json").write_text("{")
    assert load(run).summary["versions"] == {"torch": "2.13.0"}


def test_empty_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"config": {"preset": "tiny"}}))
    shown = page(tmp_path)
    assert "no step has been recorded" in shown.text
    assert shown.figures == {}
