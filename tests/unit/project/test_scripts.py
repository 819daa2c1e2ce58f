"""The scripts that compare Megatron-LM's runs and its own tests, stock and with flux: what they make of the files."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.metrics.metrics_records import sampled_record

SCRIPTS = Path(__file__).parents[3] / "scripts"
LINE = (
    " [2026-01-01 10:00:00.000001] iteration {i:8d}/       3 | consumed samples: {i:12d} | "
    "elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 1.0 | learning rate: 3.0E-05 | "
    "global batch size:     4 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} | "
    "number of skipped iterations:   0 |\n"
)
SAID = "done> megatron-flux: 9 layers of rank 0 run flux; calls so far: 9 all_gather_gemm, 9 gemm_reduce_scatter\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    earlier = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - earlier:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(SCRIPTS)):
            del sys.modules[name]


def log(folder: Path, losses: list[float], more: str = "") -> None:
    folder.mkdir(parents=True)
    lines = [
        LINE.format(i=i, ms=100.0 * i, loss=loss, norm=1.5)  # a log interval of 1
        for i, loss in enumerate(losses, start=1)
    ]
    (folder / "run.log").write_text(lines[0] + more + "".join(lines[1:]))


# megatron_lm_compare.py


def test_rows_of_a_log(script: Any, tmp_path: Path) -> None:
    compare = script("megatron_lm_compare")
    log(tmp_path / "run", [10.5, 9.25, 8.0], more="noise\n")
    rows = compare.rows(tmp_path / "run" / "run.log")
    assert rows[2] == {"lm loss": 9.25, "grad-norm": 1.5, "iteration-time": 0.2}
    assert list(rows) == [1, 2, 3]
    assert compare.times(rows, 1) == pytest.approx({"median": 0.25, "p10": 0.21, "p90": 0.29, "iterations": 2})
    assert compare.times(rows, 2) is None


def test_difference(script: Any) -> None:
    compare = script("megatron_lm_compare")
    stock = {1: {"lm loss": 2.0}, 2: {"lm loss": 1.0}}
    flux = {1: {"lm loss": 2.0}, 2: {"lm loss": 1.5}}
    assert compare.difference(stock, stock, "lm loss")["same bits"] is True
    found = compare.difference(stock, flux, "lm loss")
    assert found == {"same bits": False, "largest difference": 0.5, "mean difference": 0.25}


# megatron_lm_gpus.py


def against_stock(script: Any, out: Path, more: str) -> dict[str, Any]:
    runs = {"local-stock": {"exit code": 0}, "local-run": {"exit code": 0}}
    log(out / "local-stock", [3.0, 2.0, 1.0])
    log(out / "local-run", [3.0, 2.0, 1.25], more=more)
    options = argparse.Namespace(runs=[("local", "stock"), ("local", "run")], skip=1)
    return script("megatron_lm_gpus")._against_stock(options, out, runs)["local-run"]


def test_a_run_beside_stock(script: Any, tmp_path: Path) -> None:
    found = against_stock(script, tmp_path, SAID)
    assert found["lm loss"] == pytest.approx(
        {"same bits": False, "largest difference": 0.25, "mean difference": 0.25 / 3}
    )
    assert found["iteration-time (s)"]["run"]["median"] == pytest.approx(0.25)
    assert found["flux logged"] is True


def test_a_run_in_which_flux_never_ran_counts_as_failed(script: Any, tmp_path: Path) -> None:
    assert against_stock(script, tmp_path, "")["flux logged"] is False


def test_what_has_ended_is_there_when_the_next_run_is_killed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out = script("megatron_lm_gpus"), tmp_path / "out"
    runs = [("local", "stock"), ("local", "repeat"), ("local", "run")]

    def run(options: Any, here: Any, out: Path, name: str, implementation: str, arm: str) -> dict[str, Any]:
        if arm == "run":
            raise KeyboardInterrupt
        log(out / name, [3.0, 2.0, 1.0])
        return {"exit code": 0, "seconds": 1.0}

    monkeypatch.setattr(
        module, "_options", lambda: argparse.Namespace(runs=runs, skip=1, out=out, checkout=tmp_path, nproc=2)
    )
    monkeypatch.setattr(module, "_arguments", lambda options: [])
    monkeypatch.setattr(module, "_run", run)
    for name in ("described", "prepare"):
        monkeypatch.setattr(module.machine, name, lambda *given: None)
    with pytest.raises(KeyboardInterrupt):
        module.main()
    found = json.loads((out / "comparison.json").read_text())
    assert list(found["runs"]) == ["local-stock", "local-repeat"]
    assert found["against stock"]["local-repeat"]["lm loss"]["same bits"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runs", "local:fast"], "--runs local:fast: give local or transformer_engine, a colon and one of stock"),
        (["--runs", "stock"], "--runs stock: give local or transformer_engine"),
        (["--nproc", "1"], "tensor parallelism needs 2 GPUs or more, this machine has 1"),
        (["--more='a b"], """--more: "'a b": No closing quotation"""),
    ],
)
def test_bad_options(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(sys, "argv", ["megatron_lm_gpus.py", str(tmp_path), "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as exit_:
        script("megatron_lm_gpus")._options()
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


# peer_tests.py


def outcomes(folder: Path, arm: str, rank: int, patched: bool = True, **tests: str) -> None:
    (folder / arm).mkdir(exist_ok=True)
    rows = [{"test": name, "outcome": outcome, "why": "because"} for name, outcome in tests.items()]
    counts = [
        {"patched": patched, "calls": {"all_gather_gemm/reference": n}, "fallbacks": {"row: tp = 1": 1}} for n in (1, 2)
    ]
    lines = [json.dumps(row) for row in [{"flux": counts[0]}, *rows, {"flux": counts[1]}]]
    (folder / arm / f"f.rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def peers(script: Any, out: Path, *files: str, ended: int | None = 0, only: str = "") -> tuple[int, dict[str, Any]]:
    module = script("peer_tests")
    results = {
        arm: {"tests": {}, "ended": {}, "flux": module.Counter(), "stock": module.Counter(), "patched": []}
        for arm in module.ARMS
    }
    for arm in module.ARMS:
        module._collect(results[arm], out, arm, "f", ended, 2)
        results[arm]["ended"] = {"together": results[arm]["ended"]["f"]}
    code = module._compare(results, list(files), out, argparse.Namespace(nproc=2, cpu=True, only=only))
    return code, json.loads((out / "comparison.json").read_text())


def test_what_stock_passes_on_all_ranks_must_pass_with_flux_on_all(script: Any, tmp_path: Path) -> None:
    for rank in (0, 1):
        outcomes(
            tmp_path, "stock", rank, good="passed", bad="failed", one_rank="passed", gone="passed", never="skipped"
        )
        outcomes(
            tmp_path, "flux", rank, good="passed", bad="failed", one_rank=("passed", "failed")[rank], never="skipped"
        )
    code, found = peers(script, tmp_path)
    assert code == 1
    assert found["failed_by_flux_only"] == {
        "one_rank": {"outcome": "failed", "why": "because"},
        "gone": {"outcome": "not run", "why": ""},
    }
    assert found["counts"]["flux"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert found["flux_calls"] == {"all_gather_gemm/reference": 4}
    assert found["stock_calls_of_patched_layers"] == {"row: tp = 1": 2}


def test_a_test_that_a_rank_did_not_finish_has_failed(script: Any, tmp_path: Path) -> None:
    for arm in ("stock", "flux"):
        outcomes(tmp_path, arm, 0, good="passed", hangs="passed")
        outcomes(tmp_path, arm, 1, good="passed")
    code, found = peers(script, tmp_path)
    assert code == 0
    assert found["tests"]["hangs"]["flux"] == {"outcome": "failed", "why": "not finished"}


def test_a_run_that_was_cut_short_is_no_comparison(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever stock did not come to would otherwise count as passed by flux."""
    for arm in ("stock", "flux"):
        for rank in (0, 1):
            outcomes(tmp_path, arm, rank, **{"c.py::t": "passed"})
    assert peers(script, tmp_path, "c.py")[0] == 0
    code, found = peers(script, tmp_path, "c.py", ended=None)
    assert (code, found["failed_by_flux_only"], found["files_not_run"]["stock"]) == (1, {}, {})
    said = capsys.readouterr().out
    assert "- the rest of together, stock: the run ended with the time limit" in said
    assert "together in the stock arm ended with the time limit: what it had not run is not compared" in said


def test_stock_against_stock_is_no_comparison(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        outcomes(tmp_path, "stock", rank, **{"c.py::t": "passed"})
        outcomes(tmp_path, "flux", rank, patched=rank == 0, **{"c.py::t": "passed"})
    assert peers(script, tmp_path, "c.py")[0] == 1
    assert "1 ranks of the flux arm were not patched: that compares stock to stock" in capsys.readouterr().out


def test_no_test_at_all_is_a_failure(script: Any, tmp_path: Path) -> None:
    assert peers(script, tmp_path)[0] == 1


def test_every_file_that_was_asked_for_must_run(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arm in ("stock", "flux"):
        for rank in (0, 1):
            outcomes(
                tmp_path, arm, rank, **{"a.py (import)": "failed", "b.py (import)": "skipped", "c.py::t": "passed"}
            )
    code, found = peers(script, tmp_path, "b.py", "c.py")
    assert (code, found["files_not_run"]) == (0, {"stock": {}, "flux": {}})
    code, found = peers(script, tmp_path, "a.py", "b.py", "c.py", "d.py", ended=1)
    missing = {
        "a.py": "cannot be imported: because",
        "d.py": "no test of it was reported; its run ended with exit code 1, see its log",
    }
    assert (code, found["files_not_run"]) == (1, {"stock": missing, "flux": missing})
    assert found["failed_by_flux_only"] == {}
    said = capsys.readouterr().out
    assert "| a.py | 0, 1, 0 | 0, 1, 0 | 0 |" in said
    assert "- a.py, stock: cannot be imported: because" in said
    assert "peer_tests.py: 2 of 4 files did not run in the stock arm: a.py, d.py" in said
    assert peers(script, tmp_path, "c.py", "d.py", only="t")[0] == 0  # no test of that name in d.py
    assert peers(script, tmp_path, "c.py", "d.py", only="t", ended=1)[0] == 1


def test_a_file_that_cannot_be_imported_does_not_keep_the_others_from_running(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("peer_tests")
    texts = {
        "test_a.py": "import a_package_that_is_not_there",
        "test_b.py": "import pytest\npytest.importorskip('a_package_that_is_not_there')",
        "test_c.py": "def test_good(): pass\ndef test_bad(): assert 1 > 2",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "transformer_engine.py").touch()  # else the plugin imports megatron-core
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)

    def one_rank(words: list[str], **more: Any) -> int | None:
        return limited.run([sys.executable, *words[words.index("pytest") - 1 :]], **more)

    limited = script("limited")
    monkeypatch.setattr(module, "limited", SimpleNamespace(run=one_rank))
    options = argparse.Namespace(nproc=1, only="", cpu=False, timeout=60)
    files = module._files(tmp_path, list(texts))
    # The tests' failures are in the file: with an error, torchrun would end the ranks that are still at work.
    assert module._run(options, tmp_path, tmp_path / "out", "stock", "together", files) == 0
    result: dict[str, Any] = {
        "tests": {}, "ended": {}, "flux": module.Counter(), "stock": module.Counter(), "patched": []
    }  # fmt: skip
    module._collect(result, tmp_path / "out", "stock", "together", 0, 1)
    assert {test: found["outcome"] for test, found in result["tests"].items()} == {
        "test_a.py (import)": "failed",
        "test_b.py (import)": "skipped",
        "test_c.py::test_bad": "failed",
        "test_c.py::test_good": "passed",
    }
    assert module._not_run(result, files, options) == {
        "test_a.py": "cannot be imported: ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
    }


def test_a_file_that_is_asked_for_must_be_there(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script("peer_tests")._files(tmp_path, ["tests/nowhere.py"])
    assert ended.value.code == 2
    assert "no test file at tests/nowhere.py" in capsys.readouterr().err


def test_the_plugin_writes_the_worst_phase_of_a_test(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEER_TESTS_OUT", str(tmp_path / "f"))
    monkeypatch.setenv("PEER_TESTS_ARM", "stock")
    monkeypatch.setenv("RANK", "1")
    plugin = script("peer_tests_plugin")
    for test, phases in {
        "good": ("passed", "passed", "passed"),
        "skipped_at_set_up": ("skipped", "passed"),
        "skipped_in_the_call": ("passed", "skipped", "passed"),
        "bad": ("passed", "failed", "passed"),
        "bad_tear_down": ("passed", "passed", "failed"),
    }.items():
        whens = ("setup", "teardown") if len(phases) == 2 else ("setup", "call", "teardown")
        for when, outcome in zip(whens, phases, strict=True):
            report = SimpleNamespace(nodeid=test, when=when, outcome=outcome, longrepr="E  why")
            plugin.pytest_runtest_logreport(report)
    rows = [json.loads(line) for line in (tmp_path / "f.rank1.jsonl").read_text().splitlines()]
    assert [(row["test"], row["outcome"]) for row in rows] == [
        ("good", "passed"),
        ("skipped_at_set_up", "skipped"),
        ("skipped_in_the_call", "skipped"),
        ("bad", "failed"),
        ("bad_tear_down", "failed"),
    ]


def test_the_plugin_tells_the_calls_of_a_run_that_is_cut_short(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PEER_TESTS_OUT": str(tmp_path / "f"), "PEER_TESTS_ARM": "flux", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    plugin = script("peer_tests_plugin")
    for test, calls in {"a": 0, "b": 2, "c": 2, "d": 5}.items():
        counts = {"calls": {"all_gather_gemm/fused": calls}, "fallbacks": {}}
        monkeypatch.setattr("megatron_flux.report", lambda counts=counts: counts)
        for when in ("setup", "call", "teardown"):
            plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=test, when=when, outcome="passed", longrepr=""))
    rows = [json.loads(line) for line in (tmp_path / "f.rank0.jsonl").read_text().splitlines()]
    told = [row["flux"]["calls"]["all_gather_gemm/fused"] for row in rows if "flux" in row]
    assert told == [0, 2, 5]


# limited.py


def test_a_program_past_its_limit_is_ended(script: Any, tmp_path: Path) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    began = time.monotonic()
    where = {"cwd": tmp_path, "environment": dict(os.environ), "log": tmp_path / "log"}
    assert script("limited").run([sys.executable, "-c", program], seconds=1.5, **where) is None
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "log").read_text()), 0)
    assert script("limited").run([sys.executable, "-c", "raise SystemExit(3)"], seconds=30, **where) == 3


# measure.sh and parity.py


def measure(*arguments: str, gpus: str = "8", **more: str) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM"}
    environment |= {"MEGATRON_FLUX_GPUS": gpus, **more}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "measure.sh"), *arguments], capture_output=True, text=True, env=environment, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


def test_measure_shows_every_stage_with_a_limit(tmp_path: Path) -> None:
    code, out, _ = measure("--dry-run", str(tmp_path / "a b; touch c"))
    assert code == 0
    stages = [line.partition(":")[0] for line in out.splitlines()]
    assert stages == [
        "checks",
        "groups",
        "tests",
        "ops",
        "layer",
        *(f"fp8_{which}" for which in ("gemm", "checks", "te", "ops")),
        *(f"fp8_layer_{recipe}" for recipe in ("delayed", "current", "blockwise")),
        "inference",
        "connections",
        "graphs",
        "stand_in_checks",
        "stand_in_ops",
        "stand_in_layer",
        "parity",
        "parity_dp",
        *(f"fp8_parity_{recipe}" for recipe in ("delayed", "current", "blockwise")),
        "compare",
        "fp8_compare",
        "megatron_lm",
        *(f"host_checks_{way}_{queues}" for way in ("host", "p2p") for queues in (1, 8)),
        "host_ops",
        "host_layer",
        "host_graphs",
        *(f"host_compare_{wire}" for wire in ("exact", "fp8")),
        *(f"host_parity_{backend}" for backend in ("chunked", "chunked_fp8")),
    ]
    assert all(": timeout " in line or ": left out, " in line for line in out.splitlines())
    assert r"a\ b\;\ touch\ c/ops" in out
    assert not any(tmp_path.iterdir())
    code, out, _ = measure("--dry-run", str(tmp_path), "groups", "parity_dp", "ops", gpus="2")
    assert [line.partition(",")[0] for line in out.splitlines()[:2]] == ["groups: left out", "parity_dp: left out"]


def test_parts_of_a_stage_can_be_named(tmp_path: Path) -> None:
    """As where GPUs are lent for minutes: each part ends within ten, but for all the tests at once."""
    code, out, _ = measure("--dry-run", str(tmp_path), "fp8_ops", "host_checks_p2p_8", "host_parity")
    assert code == 0
    words = dict(line.split(": ", 1) for line in out.splitlines())
    assert list(words) == ["fp8_ops", "host_checks_p2p_8", "host_parity_chunked", "host_parity_chunked_fp8"]
    assert words["host_checks_p2p_8"].endswith("checks_host.py --way p2p")
    assert "--backend chunked_fp8 " in words["host_parity_chunked_fp8"]
    _, out, _ = measure("--dry-run", str(tmp_path), MEGATRON_LM="there")
    limits = {line.partition(":")[0]: int(line.split()[2]) for line in out.splitlines() if ": timeout " in line}
    assert [stage for stage, limit in limits.items() if limit >= 600] == ["tests"]


def test_measure_stays_on_the_gpus_it_was_given(tmp_path: Path) -> None:
    """Two that stand in for eight are the first two of those."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "on $CUDA_VISIBLE_DEVICES"\n')
    python.chmod(0o755)
    stages = ("checks", "stand_in_checks", "stand_in_ops", "stand_in_layer")
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    code, _, _ = measure(str(tmp_path / "out"), *stages, PATH=path, CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert code == 0
    assert {(tmp_path / "out" / f"{stage}.log").read_text() for stage in stages} == {"on 4,5,6,7\n"}


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        ([], "8", "./scripts/measure.sh [--dry-run] OUT [STAGE...]"),
        (["out", "opps"], "8", "unknown stage opps; use some of: checks groups"),
        (["out"], "3", "3 GPUs; it measures on 2, 4 or 8 of one host"),
    ],
)
def test_measure_refuses(arguments: list[str], gpus: str, said: str) -> None:
    code, _, err = measure(*arguments, gpus=gpus)
    assert code == 2
    assert said in err


def curve(*losses: float, first: int = 1) -> list[dict[str, Any]]:
    return [{"iteration": i, "lm loss": loss} for i, loss in enumerate(losses, first)]


def test_parity_compares_what_both_have_with_the_spread(script: Any) -> None:
    parity = script("parity")
    found = parity.difference(curve(4, 4, 4, 4), curve(5, 4.4, first=3), "lm loss")
    assert found == {
        "steps": 2,
        "largest": 0.25,
        "mean": pytest.approx(0.175),
        "mean_of_last_quarter": pytest.approx(0.1),
    }
    pairs = {"stock / stock again": {"mean": 0.1}, "stock / flux": {"mean": 0.19}}
    assert parity.within(pairs, 2.0)
    assert not parity.within(pairs | {"stock / resumed": {"mean": 0.21}}, 2.0)
    assert parity.within({"a": {"mean": 0.0}, "b": {"mean": 0.0}}, 2.0)
    assert not parity.within({"a": {"mean": 0.0}, "b": {"mean": 1e-9}}, 2.0)


RUN = """#!/usr/bin/env bash
while (($#)); do
    case $1 in
        --out) out=$2 ;;
        --no-flux) arm=baseline ;;
        --load) [[ $2 == *stock ]] && exit 3 ;;
        --save) mkdir -p "$2" ;;
    esac
    shift
done
mkdir -p "$out/${arm:-flux}"
cp "$RECORDS" "$out/${arm:-flux}/metrics.jsonl"
"""


def test_parity_leaves_what_has_ended_where_a_run_does_not(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, out = tmp_path / "python", tmp_path / "out"
    training.write_text(RUN)
    training.chmod(0o755)
    records = [sampled_record(i, flux=True) for i in (1, 2)]
    (tmp_path / "records").write_text("".join(json.dumps(one) + "\n" for one in records))
    monkeypatch.setenv("RECORDS", str(tmp_path / "records"))
    monkeypatch.setattr(sys, "executable", str(training))
    monkeypatch.setattr(sys, "argv", ["parity", "--out", str(out), "--", "--steps", "2"])
    with pytest.raises(subprocess.CalledProcessError):
        script("parity").main()
    found = json.loads((out / "parity.json").read_text())
    assert list(found["curves"]["lm loss"]) == [
        "stock / stock again", "stock / flux", "stock again / flux", "stock / stock, resumed from flux"
    ]  # fmt: skip
    assert found["within_spread"] == {"lm loss": True, "grad-norm": True}
    assert found["flux_calls"] == records[0]["flux/all_gather_gemm_calls"] > 0
