"""``megatron-flux slurm plan``: what it prints and writes, that it says Prediction everywhere, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_flux.cli import main as cli

RESULTS = Path(__file__).parents[3] / "results"
OPS = ("--ops", RESULTS / "ops-h200x4-nvlink" / "m8192")
GPT, LLAMA = (RESULTS / "layer-h200x4-ahead" / "sustained" / name for name in ("gpt3", "llama"))
LAYERS = ("--layers", GPT, "--layers", LLAMA)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command in this process, in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megatron-flux", "slurm", "plan", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return call


def fetched(page: str) -> list[str]:
    """What a browser would fetch to show the page."""

    class Tags(HTMLParser):
        found: ClassVar[list[str]] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [f"{tag} {value}" for name, value in attrs if name in ("src", "href") and value]

    Tags().feed(page)
    return Tags.found


def test_every_output_says_that_it_is_a_prediction(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--out", "plans/gpt3")
    assert code == 0, err
    folder = tmp_path / "plans" / "gpt3"
    page, stored = (folder / "plan.html").read_text(), json.loads((folder / "plan.json").read_text())
    title = (
        "Prediction: gpt3-175b on 128 x h100-sxm, tp 8 x pp 8 x dp 2, micro-batch 4 x 32, sequence 2048, link nvlink"
    )
    assert title in out
    assert stored["kind"] == "Prediction"
    assert f"<title>{title}</title>" in page
    # Every chart carries it too: one may be copied out of the page.
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page).group(1))
    assert len(figures) == 3
    for figure in figures.values():
        assert any("prediction" in figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
    assert [what for what in fetched(page) if not what.startswith("a #")] == []
    assert out.count("Prediction") == 4  # step, speed-up, memory, links
    for name in ("utilization", "exposed TP", "pipeline bubble", "optimizer", "activations", "flux workspace"):
        assert name in out


def test_json_is_what_is_stored(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--json", "--out", "plans", "--preset", "llama2-70b", "--device", "a100-sxm")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "plans" / "plan.json").read_text())
    assert list(tmp_path.iterdir()) == [tmp_path / "plans"]


def test_nothing_is_written_unless_asked(run: Run, tmp_path: Path) -> None:
    assert run()[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_measured_files_name_the_device_and_are_named(run: Run) -> None:
    code, out, _ = run(*OPS, *LAYERS, "--gpus", "4", "--tp", "4", "--pp", "1", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["job"]["device"] == "h200"
    assert str(OPS[1]) in told["inputs"]["gemms"]
    assert told["inputs"]["layers"] == f"{GPT}, {LLAMA}"
    assert 1 < told["speedup"] < 1.1


def test_the_users_figures_count(run: Run) -> None:
    def step(*words: str) -> float:
        return json.loads(run("--json", *words)[1])["arms"]["flux"]["step"]["total"]

    assert step("--overlap-efficiency", "0.1") > step()
    assert step("--link-gb-per-s", "100") > step()
    assert step("--network-gb-per-s", "5") > step()
    assert step("--host-ms-per-layer", "40") > step()


def test_validation_shows_measured_beside_predicted(run: Run) -> None:
    code, out, err = run("--validate", *LAYERS)
    assert code == 0, err
    assert out.startswith("Prediction beside the layer benchmark")
    assert sum("flux_te" in line for line in out.splitlines()) == 4  # two of time, two of memory
    told = json.loads(run("--validate", *LAYERS, "--json")[1])
    assert (told["kind"], len(told["rows"]), len(told["memory"])) == ("Prediction", 8, 4)
    gains = told["speedup_errors"]
    for kind in ("baseline", "floor", "flux"):
        found = told["errors"][kind]
        assert f"error, {kind}: mean {found['mean']:.1%}, largest {found['largest']:.1%}" in out
    assert f"error, speed-up of flux: mean {gains['mean']:.3f}, largest {gains['largest']:.3f}" in out


def test_a_topology_is_shown(run: Run) -> None:
    small = ("--check-topology", "--preset", "tiny", "--gpus", "8", "--tp", "2", "--pp", "2")
    code, out, err = run(*small)
    assert code == 0, err
    assert out.rstrip().endswith("every rank fits")
    told = json.loads(run(*small, "--json")[1])
    assert [rank["places"]["pp"] for rank in told["ranks"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert told["problems"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "100"), "100 GPUs cannot be split into tp 8 x pp 8"),
        (("--gpus", "20000"), "--gpus 20000: input should be less than or equal to 16384"),
        (("--link-gb-per-s", "0"), "--link-gb-per-s 0.0: input should be greater than 0"),
        (("--validate",), "--validate needs measured layers; give --layers"),
        (("--validate", "--check-topology"), "give one of them"),
        ((*OPS, "--device", "l20"), "--ops was measured on h200, the job is for l20; leave out --device or the file"),
        ((*LAYERS, "--device", "l20"), "--layers was measured on h200, the job is for l20"),
        (("--validate", *LAYERS, "--device", "l20"), "was measured on h200, the prediction is for l20"),
        ((*LAYERS, "--layers", GPT.parents[1] / "bursts" / "gpt3"), "both have gpt3-175b 2048 x 4"),
        (("--out", "/dev/null/x"), "--out /dev/null/x cannot be written: Not a directory; give another folder"),
        (("--ops", "none.json"), "none.json cannot be read as a summary.json of megatron-flux bench ops"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: tuple[str | Path, ...], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("megatron-flux: error: ")
    assert err.count("\n") == 1
    assert message in err
