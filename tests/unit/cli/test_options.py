"""Options from the command line and from files, and how their help reads in a narrow terminal."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_flux.cli import main as cli
from megatron_flux.cli import start
from megatron_flux.run import folder

Told = Callable[..., dict[str, Any]]
GROUPS = ["Model", "Parallelism", "Training", "Data", "Flux", "Run", "Metrics", "Checkpoints"]
COMMANDS = ("train", "compare", "tune", "bench ops", "bench layer")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """What a command line prints: what it would run, or, with another ``code``, its only line of errors."""
    monkeypatch.delenv("RANK", raising=False)

    def run(command: str, *words: str | Path, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["megatron-flux", *command.split(), *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        return err if code else out

    return run


def config(told: Told, command: str, *words: str | Path) -> dict[str, Any]:
    return json.loads(told(command, *words, "--dry-run"))["config"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_cuts_no_name_in_80_columns(told: Told, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = told(command, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    named = set(re.findall(r"^  .*?(--[a-z-]+)(?= |$)", text, re.MULTILINE))
    fields = {"--config", "--dry-run"} | ({"--show", "--force"} if command == "tune" else {"--overwrite", "--out"})
    assert fields <= named
    if command in ("train", "compare"):
        headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
        assert [name for name in headings if name in GROUPS][: len(GROUPS) - 1] == GROUPS[:-1]
        assert "--gradient-accumulation-fusion / --no-gradient-accumulation-fusion" in text


def test_options_of_two_classes_share_their_group(told: Told) -> None:
    for command in ("bench ops", "tune"):
        calls = told(command, "--help").split("Calls:\n")[1].split("\n\n")[0]
        assert {"--tokens", "--fp8"} <= set(re.findall(r"--[a-z0-9]+", calls))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --steps many", ["--steps", "many", "valid integer"]),
        ("compare --link fast", ["--link", "'fast'", "'nvlink', 'p2p', 'host', 'none'"]),
        ("watch run --interval 0", ["--interval", "0", "0.1"]),
        ("compare --lr", ["'--lr' requires an argument"]),
        ("doctor --linkz", ["no such option: --linkz", "see megatron-flux doctor --help"]),
        ("doctor here", ["(here)", "see megatron-flux doctor --help"]),
        ("quant fold", ["'IN'", "see megatron-flux quant fold --help"]),
        ("slurm render", ["'--profile'", "see megatron-flux slurm render --help"]),
        ("--fast", ["no such option: --fast", "see megatron-flux --help"]),
        ("trains", ["no such command 'trains'", "see megatron-flux --help"]),
    ],
)
def test_words_that_no_command_takes_are_one_line(told: Told, words: str, said: list[str]) -> None:
    (line,) = told(words, code=2).splitlines()
    assert line.startswith("megatron-flux: error: ")
    assert all(part in line for part in said), line


def test_a_command_of_commands_alone_is_helped(told: Told) -> None:
    assert "Commands:\n  list " in told("slurm", code=2)


def test_lists_of_commands_are_whole(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for group in ("", "bench", "slurm", "report", "trace"):
        assert not re.search(r"\w\.\.\.$", told(group, "--help"), re.MULTILINE)


def test_options_come_from_a_file_and_flags_go_over_it(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 7\nlr: 1e-4\nlayer-backend: ['*.mlp.*=reference']\nstrict: true\nnum_layers: 4\ntp: 2\n")
    found = config(told, "train", "--config", file, "--steps", "9", "--no-strict", "--nproc", "4")
    assert (found["steps"], found["lr"], found["strict"], found["world_size"]) == (9, 1e-4, False, 4)
    assert found["layer_backend"] == ["*.mlp.*=reference"]
    assert found["shape"]["num_layers"] == 4
    # A default that is given counts as given.
    assert config(told, "train", "--config", file, "--steps", "100")["steps"] == 100


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compare", "--nproc 4 --pp 2 --num-layers 4 --profile-steps 3-4 --steps 40 --hidden-size 64 --wandb-tags a"),
        ("train", "--nproc 4 --no-flux --precision bf16 --data-cache x --save s --save-interval 3"),
        ("bench ops", "--tp 4 --preset llama2-70b,gpt3-175b --tokens 1024 --rounds 3"),
        ("bench ops", "--tp 4 --preset llama2-70b --fp8 delayed,blockwise"),
        (
            "bench layer",
            "--tp 4 --preset gpt3-175b --seq-length 1024 --variants te,flux_te:backend=fused",
        ),
        ("bench layer", "--tp 2"),
        ("bench layer", "--tp 4 --preset small --mode decode --micro-batch-size 1,2"),
    ],
)
def test_a_runs_config_is_a_file_of_options(told: Told, tmp_path: Path, command: str, words: str) -> None:
    first = json.loads(told(command, *words.split(), "--out", tmp_path / "first", "--dry-run"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(first))
    again = json.loads(told(command, "--config", file, "--out", tmp_path / "first", "--dry-run"))
    assert (again["config"], again.get("cost")) == (first["config"], first.get("cost"))
    own = json.loads(told(command, "--config", file, "--dry-run"))["config"]["out"]
    assert own != str(tmp_path / "first"), "that run's folder"


def test_another_preset_over_a_runs_config_brings_its_own_sizes(told: Told, tmp_path: Path) -> None:
    """They were the first one's, under the other's name."""
    file = tmp_path / "config.json"
    file.write_text(told("train", "--nproc", "2", "--preset", "tiny", "--steps", "7", "--dry-run"))
    other = ["train", "--preset", "llama2-70b", "--nproc", "2", "--steps", "7"]
    assert config(told, "train", "--config", file, "--preset", "llama2-70b") | {"out": ""} == config(told, *other) | {
        "out": ""
    }
    assert config(told, "train", "--config", file, "--preset", "llama2-70b", "--lr", "3")["lr"] == 3
    options = tmp_path / "options.yaml"  # what somebody has written down himself stays
    options.write_text("preset: tiny\nnum_layers: 6\n")
    assert config(told, "train", "--config", options, "--preset", "llama2-70b")["shape"]["num_layers"] == 6


def test_a_resumed_comparison_keeps_its_turns(told: Told, tmp_path: Path) -> None:
    """Their default depends on the steps: longer ones took the numbers of earlier ones, and were paired with them."""
    saved, run = tmp_path / "saved", config(told, "compare", "--nproc", "2", "--steps", "80")
    for arm in ("baseline", "flux"):
        checkpoint = saved / arm / "iter_0000010"
        checkpoint.mkdir(parents=True)
        about = {"iteration": 10, "consumed_sequences": 80, "files": {}, **run}
        (checkpoint / "megatron_flux.json").write_text(json.dumps(about))
        (saved / arm / "latest_checkpointed_iteration.txt").write_text("10")
    resumed = ["compare", "--nproc", "2", "--steps", "160", "--load", saved]
    assert config(told, *resumed)["block_steps"] == run["block_steps"] == 10
    assert config(told, *resumed, "--block-steps", "7")["block_steps"] == 7


def test_a_comparison_from_the_config_of_a_training(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(told("train", "--nproc", "2", "--steps", "50", "--no-flux", "--dry-run"))
    found = config(told, "compare", "--config", file)
    assert (found["steps"], found["block_steps"], found["warmup_steps"]) == (50, 6, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_layer: 3", "num_layer is no option of this command; use some of: preset, num_layers, "),
        ("device: cuda", "device is no option of this command"),
        ("steps: many", "steps many: input should be a valid integer"),
        ("steps: 0", "steps 0: input should be greater than or equal to 1"),
        ("steps: true", "steps is true, which is no value of this option"),
        ("steps:", "steps None: input should be a valid integer"),
        ("link: wifi", "link wifi: input should be 'nvlink', 'p2p', 'host' or 'none'"),
        ("data: [1]", "data.0 1: input is not a valid path"),
        ("- steps", "must hold options as NAME: VALUE, or be a run folder's config.json"),
        ("a: [", "is no YAML: while parsing"),
        ("a: !!python/object/apply:os.getcwd []", "is no YAML: could not determine a constructor"),
    ],
)
def test_what_a_file_cannot_say(told: Told, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (line,) = told("train", "--config", file, "--dry-run", code=2).splitlines()
    assert line.startswith(f"megatron-flux: error: --config {file}")
    assert said in line


def test_a_file_that_is_missing(told: Told, tmp_path: Path) -> None:
    said = told("compare", "--config", tmp_path / "none.yaml", code=2)
    assert (
        said == f"megatron-flux: error: --config {tmp_path / 'none.yaml'} cannot be read: No such file or directory\n"
    )


def _train(data: Path, barrier: Any, made: Any) -> None:
    """A process that starts a training as far as its ranks; two of them would need as many as there are."""
    folder.default_folder = lambda *words: Path("runs") / "20261122-101500-train-tiny"
    start.on_ranks = lambda command, about, module, argument, *rest, **more: made.put(argument)
    sys.argv = ["megatron-flux", "train", "--nproc", "2", "--data", str(data), "--data-cache", str(data.parent / "c")]
    barrier.wait(60)
    cli.main()


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    text = tmp_path / "text"
    text.write_text("word " * 200)
    earlier = tmp_path / "runs" / "20261122-101500-train-tiny"  # of the same second, and under way
    earlier.mkdir(parents=True)
    (earlier / folder.CONFIG).write_text("{}")
    context, count = multiprocessing.get_context("fork"), 4
    barrier, made = context.Barrier(count), context.Queue()
    processes = [context.Process(target=_train, args=(text, barrier, made)) for _ in range(count)]
    for process in processes:
        process.start()
    names = {Path(made.get(timeout=60)).name for _ in processes}
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count
    assert names == {f"{earlier.name}-{n}" for n in range(2, count + 2)}
    for name in names:
        assert yaml.safe_load((tmp_path / "runs" / name / folder.CONFIG).read_text())["config"]["out"] == f"runs/{name}"
