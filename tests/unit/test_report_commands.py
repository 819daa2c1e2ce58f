"""The commands ``report`` and ``watch``: what they write, print and exit with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_flux import cli
from megatron_flux.errors import UserError
from tests.unit.report_runs import RESULTS, full_arms, full_run

CPU = RESULTS / "compare-cpu-tiny"


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
    assert (folder / "report.md").read_text().startswith("# flux 1.00x")


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
    assert (
        output.strip()
        .splitlines()[-1]
        .startswith(
            "against results: 1 of 6 quantities left their bands: flux step time, median (ms) +20.0 % (band +5 %)"
        )
    )
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
