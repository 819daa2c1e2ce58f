"""Options from the command line, from ``--set`` and from files; help and what is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.cli import command_line
from megatron_flux.train.options import TrainOptions

Cli = Callable[..., str]


def config(cli: Cli, name: str, *words: str | Path) -> dict[str, Any]:
    return json.loads(cli(name, *words, "--dry-run"))["config"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare --steps many", "--steps many: input should be a valid integer"),
        ("compare --set steps", "--set steps: give NAME=VALUE, such as timeout=1800"),
        ("compare --set stepz=3", "--set stepz=3 is no option of this command; did you mean steps?"),
        ("compare --timeout 3", "--timeout is an option of files: give --set timeout=VALUE; see megatron-flux compare"),
        ("compare --lr", "--lr: expected one argument; see megatron-flux compare --help"),
        ("doctor --jsn", "no such option: --jsn, did you mean --json?; see megatron-flux doctor --help"),
        ("slurm render", "--profile is required; see megatron-flux slurm render --help"),
        ("slurm sumbit", "no such command: slurm sumbit; did you mean slurm submit?"),
    ],
)
def test_words_that_no_command_takes_are_one_line(cli: Cli, words: str, message: str) -> None:
    assert cli(*words.split(), code=2).startswith(message)


def test_the_command_line_goes_over_set_and_set_over_the_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train-iters: 7\nlr: 1e-4\nlayer-backend: ['*.mlp.*=reference']\nstrict: true\ntp: 2\nseed: 3\n")
    words = ["--config", file, "--set", "steps=8", "--set", "seed=4", "--set", "wandb_tags=a,b"]
    found = config(cli, "train", *words, "--steps", "9", "--no-strict", "--nproc", "4")
    assert (found["steps"], found["seed"], found["lr"], found["strict"]) == (9, 4, 1e-4, False)
    assert (found["layer_backend"], found["wandb_tags"]) == (["*.mlp.*=reference"], ["a", "b"])
    # A default that is given counts as given.
    assert config(cli, "train", "--config", file, "--steps", "100")["steps"] == 100


def test_lists_take_commas_and_paths_none() -> None:
    read = partial(command_line.read, TrainOptions, prog="train", about="", launches=True)
    for words in (["--data", "a,{b}", "--data", "[c]"], ["--set", "data=a,{b}", "--set", "data=[c]"]):
        assert read(words)[0].data == [Path("a,{b}"), Path("[c]")]
    assert read(["--set", "wandb_tags=a, b", "--set", "wandb_tags=c"])[0].wandb_tags == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compare", "--nproc 4 --pp 2 --num-layers 4 --profile-steps 3-4 --steps 40 --set hidden_size=64,wandb_tags=a"),
        ("train", "--nproc 4 --no-flux --set=precision=bf16 --set data_cache=x --save s --save-interval 3"),
    ],
)
def test_a_runs_config_repeats_the_run_in_another_folder(cli: Cli, tmp_path: Path, name: str, words: str) -> None:
    words = words.replace("=64,", "=64 --set ")
    first = json.loads(cli(name, *words.split(), "--out", tmp_path / "first", "--dry-run"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(first))
    again = config(cli, name, "--config", file, "--out", tmp_path / "first")
    assert again == first["config"]
    assert config(cli, name, "--config", file)["out"] != str(tmp_path / "first"), "that run's folder"


def test_a_resumed_comparison_keeps_its_turns(cli: Cli, tmp_path: Path) -> None:
    """Their default depends on the steps: longer ones took the numbers of earlier ones, and were paired with them."""
    saved, run = tmp_path / "saved", config(cli, "compare", "--nproc", "2", "--steps", "80")
    for variant in ("baseline", "flux"):
        checkpoint = saved / variant / "iter_0000010"
        checkpoint.mkdir(parents=True)
        about = {"iteration": 10, "consumed_sequences": 80, "files": {}, **run}
        (checkpoint / "megatron_flux.json").write_text(json.dumps(about))
        (saved / variant / "latest_checkpointed_iteration.txt").write_text("10")
    resumed = ["compare", "--nproc", "2", "--steps", "160", "--load", saved]
    assert config(cli, *resumed)["block_steps"] == run["block_steps"] == 10
    assert config(cli, *resumed, "--set", "block_steps=7")["block_steps"] == 7
