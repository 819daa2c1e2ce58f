"""``bench ops`` and ``tune`` on a machine without GPUs: refusals, dry runs and kept choices."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_flux.bench import ops, process_group, tune
from megatron_flux.bench.shapes import OpsRun, TuneRun
from megatron_flux.cli import main as cli
from megatron_flux.run import launcher
from megatron_flux.run.rank import MEASURED

STORED = Path(__file__).parents[3] / "results" / "ops-h200x4-nvlink-triton" / "tuned.json"
FEW = ["--models", "llama-70b", "--tokens", "1024", "--directions", "forward"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command in this process, in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_FLUX_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MEGATRON_FLUX_TUNE_CACHE", *MEASURED):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megatron-flux", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return call


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Pretend to have GPUs, and collect what would be started."""

    def have(count: int) -> list[Any]:
        started: list[Any] = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(launcher, "launch", lambda *words, **more: started.append((words, more)))
        return started

    return have


def refused(run: Run, *words: str | Path) -> str:
    code, out, err = run(*words)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("megatron-flux: error: ")
    assert err.count("\n") == 1
    assert not Path("runs").exists()
    return err


@pytest.mark.parametrize(
    ("command", "works"), [(["bench", "ops"], ["--dry-run"]), (["tune"], ["--dry-run", "--show"])], ids=["ops", "tune"]
)
def test_without_gpus(run: Run, command: list[str], works: list[str]) -> None:
    line = refused(run, *command)
    for words in ("needs at least two GPUs", "torch sees no GPU", *works):
        assert words in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "gpt5"], ["'gpt5'", "gpt3-175b, llama-70b, gpt3-6.7b, llama-7b, llama-405b"]),
        (["--models", ","], ["--models", "names nothing"]),
        (["--tokens", "1k"], ["--tokens 1k", "whole numbers"]),
        (["--tokens", "1024,0"], ["--tokens 1024,0", "greater than 0"]),
        (["--tokens", "1025"], ["1025 tokens", "8 GPUs"]),
        (["--layers", "qkv,mlp"], ["'mlp'", "qkv, proj, fc1, fc2"]),
        (["--directions", "back"], ["direction 'back'", "forward, dgrad"]),
        (["--nproc", "1"], ["--nproc 1", "greater than or equal to 2"]),
        (["--nproc", "16"], ["llama-70b: 8 key/value heads", "16 GPUs"]),
    ],
)
@pytest.mark.parametrize("command", [["bench", "ops"], ["tune"]], ids=["ops", "tune"])
def test_calls_that_do_not_exist(run: Run, command: list[str], arguments: list[str], said: list[str]) -> None:
    line = refused(run, *command, "--dry-run", *arguments)
    for words in said:
        assert words in line


def test_options_out_of_range(run: Run) -> None:
    assert "--rounds 0" in refused(run, "bench", "ops", "--dry-run", "--rounds", "0")
    assert "--seconds-per-shape 0.0" in refused(run, "tune", "--dry-run", "--seconds-per-shape", "0")


def test_dry_run_of_the_benchmark(run: Run) -> None:
    code, out, _ = run("bench", "ops", "--dry-run", *FEW, "--nproc", "4", "--layers", "qkv,fc2", "--out", "somewhere")
    assert code == 0
    found = json.loads(out)
    assert found["config"]["tp"] == 4
    calls = [[c["op"], c["layer"], c["m"], c["n"], c["k"]] for c in found["calls"]]
    assert calls == [
        ["all_gather_gemm", "qkv", 1024, 2560, 8192],
        ["gemm_reduce_scatter", "fc2", 1024, 8192, 7168],
    ]
    assert not Path("somewhere").exists()


def test_tuning_on_fp8_operands(run: Run) -> None:
    few = ("tune", "--dry-run", *FEW, "--nproc", "4", "--layers", "qkv", "--directions", "dgrad")
    code, out, _ = run(*few, "--fp8", "current,blockwise")
    assert code == 0
    assert [call["fp8"] for call in json.loads(out)["calls"]] == [None, "current", "blockwise"]
    assert [call["fp8"] for call in json.loads(run(*few, "--fp8", "delayed", "--no-bf16")[1])["calls"]] == ["delayed"]
    assert "unknown FP8 recipe 'mxfp8'" in refused(run, *few, "--fp8", "mxfp8")
    assert "--no-bf16 leaves nothing to measure" in refused(run, *few, "--no-bf16")


def test_calls_on_fp8_operands(run: Run) -> None:
    few = ("bench", "ops", "--dry-run", *FEW, "--nproc", "4", "--layers", "qkv")
    code, out, _ = run(*few, "--fp8", "delayed,blockwise")
    assert code == 0
    assert [call["fp8"] for call in json.loads(out)["calls"]] == [None, "delayed", "blockwise"]
    code, out, _ = run(*few, "--fp8", "current", "--no-bf16")
    found = json.loads(out)
    assert [call["fp8"] for call in found["calls"]] == ["current"]
    wanted = OpsRun(**found["config"])
    assert ops.own_queues(wanted) is None, "async-TP has no FP8"
    assert ops.own_queues(wanted.model_copy(update={"bf16": True})) == "8"
    assert "unknown FP8 recipe 'tensor'" in refused(run, *few, "--fp8", "tensor")
    assert "--no-bf16 leaves nothing to measure" in refused(run, *few, "--no-bf16")


def test_what_is_tuned_has_its_link_and_wires(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("link", "wire", "grad_wire")

    def found(*words: str) -> tuple[Any, ...]:
        code, out, _ = run("tune", "--dry-run", *FEW, *words)
        assert code == 0
        return tuple(json.loads(out)["config"][name] for name in names)

    assert found() == (None, "exact", "exact")
    assert found("--link", "host", "--wire", "fp8") == ("host", "fp8", "fp8")
    assert found("--link", "p2p", "--wire", "int8", "--grad-wire", "exact") == ("p2p", "int8", "exact")
    monkeypatch.setenv("MEGATRON_FLUX_GRAD_WIRE", "int8")
    assert found("--link", "host") == ("host", "exact", "int8")


def test_dry_run_of_tuning(run: Run) -> None:
    code, out, _ = run("tune", "--dry-run", "--seconds-per-shape", "5", "--cache", "mine.json")
    assert code == 0
    found = json.loads(out)
    # Eight GPUs unless said otherwise; three models, five sizes, two directions, four layers.
    assert found["config"]["tp"] == 8
    assert len(found["calls"]) == 3 * 5 * 2 * 4
    assert found["config"]["cache"] == str(Path.cwd() / "mine.json")
    assert not Path("mine.json").exists()


def test_show_prints_kept_choices(run: Run) -> None:
    code, out, _ = run("tune", "--show", "--cache", STORED)
    assert code == 0
    assert "fused (a plan of another version)" in out
    assert out.splitlines()[-1] == f"choices: {STORED}"


def test_show_reads_where_training_reads(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tuned.json").write_text(STORED.read_text())
    assert "44 call(s)" in run("tune", "--show")[1]


def test_show_with_nothing_to_show(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("tune", "--show")
    assert code == 0
    assert out == f"nothing has been tuned yet: no choices in {tmp_path / 'cache' / 'tuned.json'}\n"
    assert "absent.json does not exist" in refused(run, "tune", "--show", "--cache", "absent.json")


def test_show_does_nothing_else(run: Run) -> None:
    for option in ("--force", "--dry-run"):
        assert "--show only prints" in refused(run, "tune", "--show", option)


@pytest.mark.parametrize("how", ["--show", "--dry-run"])
def test_a_damaged_cache(run: Run, how: str) -> None:
    Path("broken.json").write_text("{")
    assert "broken.json cannot be read" in refused(run, "tune", how, "--cache", "broken.json")


def test_one_gpu_is_not_enough(run: Run, gpus: Callable[[int], list[Any]]) -> None:
    assert gpus(1) == []
    assert "1 process(es) with 1 GPU(s)" in refused(run, "bench", "ops", "--nproc", "2")


def test_no_more_ranks_than_gpus(run: Run, gpus: Callable[[int], list[Any]]) -> None:
    gpus(4)
    assert "--nproc 8 on a machine with 4 GPU(s)" in refused(run, "tune", "--nproc", "8")


def test_a_folder_that_holds_other_files(run: Run, gpus: Callable[[int], list[Any]], tmp_path: Path) -> None:
    gpus(2)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for more in ([], ["--overwrite"], ["--dry-run"]):
        assert "not a run folder" in refused(run, "bench", "ops", "--out", "thesis", *more)


def test_a_cache_that_could_not_be_kept(run: Run, gpus: Callable[[int], list[Any]]) -> None:
    gpus(2)
    Path("file").write_text("")
    assert "its folder cannot be used" in refused(run, "tune", "--cache", Path("file", "below", "tuned.json"))


def test_the_benchmark_starts_with_multicast_off(
    run: Run, gpus: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # what the user has set stays
    started = gpus(4)
    monkeypatch.setattr(sys, "argv", ["megatron-flux", "bench", "ops", *FEW, "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    ((module, text, ranks), more) = started[0]
    assert (module, ranks) == (ops.__name__, 4)
    assert more["left"] == "what was measured is in run"
    wanted = OpsRun.model_validate_json(text)
    assert wanted.cases()[0].n == 2560
    assert wanted.out == Path("run")
    assert json.loads(Path("run", "config.json").read_text())["config"]["tp"] == 4
    assert {name: os.environ[name] for name in MEASURED} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "UB_SKIPMC": "1",
    }


def test_async_tp_gets_processes_with_its_own_number_of_queues(
    run: Run, gpus: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    queues: list[str] = []

    def launch(module: str, text: str, *_: Any, **__: Any) -> None:
        assert module == ops.__name__
        wanted = OpsRun.model_validate_json(text)
        assert wanted.out == Path("run") or len(queues) > 1
        queues.append(f"{wanted.command} {os.environ['CUDA_DEVICE_MAX_CONNECTIONS']}")

    monkeypatch.setattr(launcher, "launch", launch)
    assert run("bench", "ops", *FEW, "--out", "run")[0] == 0
    assert queues == ["bench ops 1", "async-TP 8"]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert run("bench", "ops", *FEW, "--out", "other", "--async-tp-connections", "0")[0] == 0
    assert run("bench", "ops", *FEW, "--out", "third", "--async-tp-connections", "1")[0] == 0
    assert queues[2:] == ["bench ops 1"] * 2


def test_under_a_launcher_async_tp_keeps_the_launchers_queues(
    run: Run, gpus: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = gpus(2)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ops, "work", lambda _: None)
    code, _, err = run("bench", "ops", *FEW, "--out", "run")
    assert (code, started) == (0, [])
    assert "async-TP was not measured with CUDA_DEVICE_MAX_CONNECTIONS=8: a launcher has started these processes" in err


def test_tuning_starts_with_the_chosen_file(run: Run, gpus: Callable[[int], list[Any]], tmp_path: Path) -> None:
    started = gpus(2)
    code, _, err = run("tune", *FEW, "--force", "--cache", "deep/tuned.json")
    assert code == 0
    assert "4 calls on 2 GPUs" in err
    ((module, text, ranks), _) = started[0]
    assert module == tune.__name__
    wanted = TuneRun.model_validate_json(text)
    assert (wanted.command, wanted.force, wanted.cache, ranks) == ("tune", True, tmp_path / "deep" / "tuned.json", 2)


def test_a_launchers_rank_starts_nothing(
    run: Run, gpus: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = gpus(1)  # as with one GPU bound to each task
    ran: list[Any] = []
    monkeypatch.setattr(ops, "work", ran.append)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert run("bench", "ops", *FEW, "--out", "run")[0] == 0
    assert started == []
    assert OpsRun.model_validate_json(ran[0]).tp == 4
    assert Path("run", "config.json").exists()
    assert "--nproc 2 under a launcher that started 4" in refused(run, "tune", "--nproc", "2")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "1 process(es) with 1 GPU(s)" in refused(run, "tune")


def test_the_log_says_what_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)

    def work() -> None:
        with process_group.logged_to(tmp_path / "log.txt"):
            process_group.logger.warning("a line")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        work()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].endswith(" a line")
    assert lines[1] == "ended by ValueError: boom"
    assert not any("log.txt" in str(handler) for handler in process_group.logger.handlers)
