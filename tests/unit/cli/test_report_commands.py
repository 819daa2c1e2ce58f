"""The commands ``report`` and ``watch``: what they write, print and exit with."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_flux.cli import main as cli
from megatron_flux.errors import UserError
from tests.unit.metrics.report_runs import RESULTS, full_arms, full_run

CPU = RESULTS / "report-cpu-tiny"


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_one_run_gets_its_report_beside_it(tmp_path: Path) -> None:
    folder = shutil.copytree(CPU, tmp_path / "run")
    code, output = run("report", folder)
    assert code == 0
    assert f"wrote {folder / 'report.html'}" in output.replace("\n", "")
    text = (folder / "report.md").read_text()
    assert text.startswith("# same losses: largest relative difference 0 over 80 steps; no verdict on speed (refer")


def test_a_jobs_folder_stands_for_its_repetitions(tmp_path: Path) -> None:
    """As a job's script leaves it, with logs and checkpoints beside the run folders."""
    root = tmp_path / "runs" / "gpt3-175b-compare-4711"
    for index in (0, 1, 10):
        full_run(root / f"rep-{index}" / "run")
        (root / f"rep-{index}" / "logs" / "0").mkdir(parents=True)
    (root / "rep-2" / "logs").mkdir(parents=True)  # nothing recorded yet
    (root / "collected.json").write_text("{}")
    code, output = run("report", root)
    assert code == 0
    assert f"wrote {root / 'report.html'}" in output.replace("\n", "")
    text = (root / "report.md").read_text()
    found = [line.split(":")[0] for line in text.splitlines() if line.startswith("## gpt3")]
    assert found == [f"## gpt3-175b-compare-4711/rep-{index}" for index in (0, 1, 10)]
    # One repetition alone is a report of its own, and can be held against another.
    alone = tmp_path / "runs" / "alone-7"
    shutil.copytree(root / "rep-0", alone / "rep-0")
    assert run("report", alone, "--against", root / "rep-1" / "run", "--out", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "report.md").read_text().startswith("# flux 1.1")


def test_a_jobs_folder_without_records_is_said(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "gpt3-175b-compare-4711"
    (root / "rep-0" / "logs").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no repetition of it has recorded anything yet; see .*rep-0/logs"):
        run("report", root)
    with pytest.raises(UserError, match="is not a run folder"):
        run("report", tmp_path)


def test_what_stood_in_is_named(tmp_path: Path) -> None:
    """Also without the methods that could not run, a trace and memory."""
    assert run("report", RESULTS / "stand-in-8-h200x2", "--out", tmp_path)[0] == 0
    lines = (tmp_path / "report.md").read_text().splitlines()
    for name, verdict in (("layer", "15 layer timings"), ("m2048", "2 operator calls"), ("m8192", "8 operator calls")):
        title = f"## stand-in-8-h200x2/{name}: {verdict}, NVIDIA H200 (2 standing in for 8), tp 8"
        assert title in lines
    html = (tmp_path / "report.html").read_text()
    assert html.count("(2 standing in for 8)") >= 3


def test_against(tmp_path: Path) -> None:
    results = full_run(tmp_path / "results")
    arms = full_arms()
    for item in arms["flux"]:
        item["iteration-time"] *= 1.2
    slower = full_run(tmp_path / "slower", arms)
    code, output = run("report", slower, "--against", results, "--out", tmp_path / "out")
    assert code == 1
    last = output.strip().splitlines()[-1]
    assert re.search(r"results: 1 of 6 .*: flux step time, median \(ms\) \+20.0 % \(band \+5 %\)", last)
    said = (tmp_path / "out" / "report.md").read_text()
    assert "## Against earlier results" in said
    assert "LEFT ITS BAND" in said
    assert run("report", slower, "--against", results, "--out", tmp_path / "out", "--step-time-band", 25)[0] == 0
    assert run("report", slower, "--against", results, "--out", tmp_path / "out", "--check", "loss,memory")[0] == 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    for words, said in (
        (["report", tmp_path / "no"], "no is missing; name a run folder"),
        (["report", CPU, CPU, "--against", CPU], "--against compares one run folder, 2 were given"),
        (["report", CPU, "--against", CPU, "--check", "x"], "--check 'x': choose some of"),
        (["report", CPU, "--out", CPU / "config.json"], "cannot write"),
        (["watch", tmp_path / "no", "--wait", "0"], "no is missing; name the run folder of a training job"),
    ):
        with pytest.raises(UserError) as caught:
            run(*words)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_png_without_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "no-browser"))
    with pytest.raises(UserError, match=r"leave out --png: report.html has the figures") as caught:
        run("report", CPU, "--out", tmp_path / "out", "--png")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "out" / "report.html").is_file()


def test_help_names_the_commands() -> None:
    code, output = run("report", "--help")
    assert code == 0
    assert all(name in output for name in ("local", "sync", "wandb"))
    assert "--against" in run("report", "local", "--help")[1]
