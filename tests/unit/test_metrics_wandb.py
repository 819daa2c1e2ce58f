"""The wandb mirror: real offline files read back, nothing secret in them, and no failure that reaches training."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron_flux.errors import UserError
from megatron_flux.metrics import WandbMirror
from megatron_flux.metrics.redact import without_secrets
from tests.unit.metrics_records import record

API_KEY = "0123456789abcdef" * 2 + "cafe4242"
CONFIG = {"preset": "tiny", "tokenizer": "bytes", "api_key": "hunter-1", "nested": {"hf_token": "hunter-2", "tp": 2}}


def mirror(mode: str, folder: Path, job_type: str = "flux") -> WandbMirror:
    return WandbMirror(mode, "project-x", "group-x", job_type, f"name-{job_type}", CONFIG, folder)


def inspect(path: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_files_read_back_and_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setenv("SOME_VARIABLE", "value-of-a-variable")
    monkeypatch.setattr(sys, "argv", ["megatron-flux", "--argument", "value-of-an-argument"])
    # Both arms at once, as in a comparison.
    with mirror("offline", tmp_path, "baseline") as baseline, mirror("offline", tmp_path) as flux:
        for n in range(1, 6):
            baseline.write(record(n))
            flux.write(record(n, flux=True, **{"mfu": None, "flux/fallbacks": {"fp8": n}}))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for secret in (API_KEY, "hunter-1", "hunter-2", "value-of-a-variable", "value-of-an-argument"):
        assert [path for path, content in files.items() if secret.encode() in content] == [], secret
    runs = {}
    for path in files:
        if path.suffix == ".wandb":
            summary = json.loads(inspect(path, "--summary"))
            runs[summary["name"]] = (path, summary)
    assert sorted(runs) == ["name-baseline", "name-flux"]
    path, summary = runs["name-flux"]
    assert summary["project"] == "project-x"
    assert summary["state"] == "finished"
    assert summary["config"] == {"preset": "tiny", "tokenizer": "bytes", "nested": {"tp": 2}}
    assert summary["summary"]["iteration"] == 5
    assert summary["summary"]["lm loss"] == pytest.approx(4.5)
    assert summary["summary"]["flux/active_layers"] == 8
    assert summary["summary"]["flux/fallbacks/fp8"] == 5
    assert runs["name-baseline"][1]["summary"]["mfu"] == 0.4
    records = inspect(path)
    assert records.count('"type":"history"') == 5
    assert '"group-x"' in records
    assert '"flux"' in records
    assert '"step_metric":"iteration"' in records


def test_disabled_writes_nothing_and_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now raises
    with mirror("disabled", tmp_path) as disabled:
        disabled.write(record(1))
    assert list(tmp_path.iterdir()) == []


def test_unknown_mode(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'loud' is not known; choose one of disabled, offline, online"):
        mirror("loud", tmp_path)


def fake_wandb(**functions: Any) -> types.ModuleType:
    module = types.ModuleType("wandb")
    module.Settings = lambda **settings: settings
    module.login = lambda **_: True
    vars(module).update(functions)
    return module


class Run:
    """A wandb run that fails from the second record on."""

    url = dir = ""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished: list[int] = []

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)
        if len(self.logged) > 1:
            raise BrokenPipeError("service\ndied")

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)
        raise RuntimeError("cannot finish")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


@pytest.mark.parametrize("error", [ImportError("no wandb"), RuntimeError("no network"), SystemExit(1)])
def test_failure_at_start_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def init(**_: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init=init))
    with caplog.at_level(logging.INFO, logger="megatron_flux"), mirror("offline", tmp_path) as broken:
        broken.write(record(1))
        broken.write(record(2))
    assert len(warnings(caplog)) == 1
    assert str(error) in warnings(caplog)[0]
    assert "metrics.jsonl goes on" in warnings(caplog)[0]


def test_failure_while_logging_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init=lambda **_: run))
    with caplog.at_level(logging.WARNING, logger="megatron_flux"), mirror("offline", tmp_path) as broken:
        for n in (1, 2, 3):
            broken.write(record(n, mfu=None))
    assert [values["iteration"] for values in run.logged] == [1, 2]
    # What is not known is left out: wandb would draw a null as a gap, or as zero.
    assert set(record(1)) - set(run.logged[0]) == {"mfu", "flux/fallbacks"}
    assert len(warnings(caplog)) == 1
    assert "service died" in warnings(caplog)[0]


@pytest.mark.parametrize("failed", [False, True])
def test_run_is_closed_once_with_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failed: bool
) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init=lambda **_: run))
    opened = mirror("offline", tmp_path)
    try:
        with caplog.at_level(logging.WARNING, logger="megatron_flux"), opened:
            if failed:
                raise KeyError("training")
    except KeyError:
        assert failed
    opened.close()
    assert run.finished == [int(failed)]
    assert len(warnings(caplog)) == 1


def test_online_without_a_login_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[dict[str, Any]] = []

    def login(**options: Any) -> bool:
        asked.append(options)
        return False

    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(login=login, init=lambda **_: pytest.fail("init was called")))
    with caplog.at_level(logging.WARNING, logger="megatron_flux"):
        mirror("online", tmp_path).close()
    assert asked[0]["prompt"] is False
    assert "not logged in" in warnings(caplog)[0]


def test_secrets_are_found_by_name_at_any_depth() -> None:
    config = {
        "API_KEY": 1,
        "hf_Token": 1,
        "clientSecret": 1,
        "db_password": 1,
        "list": [{"passwd": 1, "kept": 2}],
        "nested": {"deeper": {"credentials": 1, "kept": 3}},
        "tokenizer": "bytes",
    }
    assert without_secrets(config) == {
        "list": [{"kept": 2}],
        "nested": {"deeper": {"kept": 3}},
        "tokenizer": "bytes",
    }
