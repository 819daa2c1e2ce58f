"""The wandb mirror: real offline files read back, nothing secret in them, and no failure that reaches training."""

import contextlib
import json
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wandb
from wandb.util import get_core_path

from megatron_flux.metrics.recorder import JsonlRecorder
from megatron_flux.metrics.wandb_mirror import WandbMirror
from tests.unit.metrics.metrics_records import record, sampled_record

API_KEY = "0123456789abcdef" * 2 + "cafe4242"
CONFIG = {"preset": "tiny", "tokenizer": "bytes", "api_key": "hunter-1", "nested": {"hf_token": "hunter-2", "tp": 2}}


def mirror(mode: str, folder: Path, job_type: str = "flux", **more: Any) -> WandbMirror:
    names = {"project": "project-x", "group": "group-x", "job_type": job_type, "name": f"name-{job_type}"}
    return WandbMirror(mode, CONFIG, folder, **names, **more)


def inspect(path: Path, *options: str) -> str:
    """Return what ``wandb leet inspect`` prints, without starting Python and wandb's command line for it."""
    command = [get_core_path(), "leet", "inspect", "--no-observability", "--json", *options, "--run-file", str(path)]
    done = subprocess.run([*command, str(path.parent.parent)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline_files_read_back_and_hold_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    monkeypatch.setenv("SOME_VARIABLE", "value-of-a-variable")
    monkeypatch.setattr(sys, "argv", ["megatron-flux", "--argument", "value-of-an-argument"])
    # Both variants at once, as in a comparison.
    with (
        mirror("offline", tmp_path / "baseline", "baseline") as baseline,
        mirror("offline", tmp_path / "flux", tags=["tiny", "night"]) as flux,
    ):
        for n in range(1, 6):
            baseline.write(record(n))
            flux.write(record(n, flux=True, **{"mfu": None, "flux/fallbacks": {"fp8": n}}))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for secret in (API_KEY, "hunter-1", "hunter-2", "value-of-a-variable", "value-of-an-argument"):
        assert [path for path, content in files.items() if secret.encode() in content] == [], secret
    assert json.loads(inspect(only(tmp_path / "baseline"), "--summary"))["name"] == "name-baseline"
    path = only(tmp_path / "flux")
    shown = json.loads(inspect(path, "--summary"))
    assert (shown["name"], shown["state"], shown["tags"]) == ("name-flux", "finished", ["tiny", "night"])
    assert shown["config"] == {"preset": "tiny", "tokenizer": "bytes", "nested": {"tp": 2}}
    assert shown["summary"]["lm loss"] == pytest.approx(4.5)
    assert shown["summary"]["flux/fallbacks/fp8"] == 5
    (run,) = (item["run"] for item in items(path, "run"))
    assert (run["run_group"], run["job_type"], run["project"]) == ("group-x", "flux", "project-x")
    assert steps(path) == [1, 2, 3, 4, 5]


def only(folder: Path) -> Path:
    (file,) = folder.rglob("offline-run-*/*.wandb")
    return file


def steps(path: Path) -> list[int]:
    return [item["history"]["step"]["num"] for item in items(path, "history")]


def items(path: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, inspect(path).splitlines())
    return [item for item in found if item["type"] == kind]


def test_a_resumed_run_continues_under_its_id(tmp_path: Path) -> None:
    def train(iterations: range, resume_from: int | None = None) -> str | None:
        with (
            JsonlRecorder(tmp_path / "metrics.jsonl", resume_from) as recorder,
            mirror("offline", tmp_path, resuming=resume_from is not None) as mirrored,
        ):
            for n in iterations:
                recorder.write(item := sampled_record(n, flux=True))
                mirrored.write(item)
        return mirrored.id

    # From a checkpoint of iteration 2: 3 and 4 are done again, and by a third start once more.
    ids = [train(range(1, 5)), train(range(3, 4), 2), train(range(3, 6), 2)]
    wandb.teardown()  # waits for wandb's own process, which writes the files
    with mirror("offline", tmp_path / "another", resuming=True) as another:
        pass
    assert ids == [ids[0]] * 3
    assert ids[0] != another.id
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [*map(steps, files)] == [[1, 2, 3, 4], [], [5]], "an iteration that is sent twice is shown twice"
    last = json.loads(inspect(files[-1], "--summary"))
    assert last["summary"]["flux/e_overlap/all_gather_gemm"] == pytest.approx(0.8)
    assert last["summary"]["flux/throttle_reasons/sw_power_cap"] == 1
    assert not [name for name in last["summary"] if name.startswith(("flux/calls", "flux/run", "schema"))]
    # The rest is configuration.
    assert last["config"]["run"]["nodes"] == ["node1"]
    assert last["config"]["choices"]


@pytest.mark.parametrize("damaged", ["", "{}", "[1]", '{"id"'])
def test_a_damaged_id_is_a_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str) -> None:
    fake_wandb(monkeypatch)
    (tmp_path / "wandb.json").write_text(damaged)
    assert mirror("offline", tmp_path, resuming=True).id is not None


def fake_wandb(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None, *, logged_in: bool = True) -> Any:
    """wandb whose service fails from the second record on, or at the start by ``error``."""
    fake = mock.MagicMock(Settings=dict)
    fake.setup.return_value.settings = types.SimpleNamespace(project=None, mode="online")
    fake.login.return_value = logged_in
    fake.init.return_value = run = mock.MagicMock(url="", dir="", project="", id="fake")
    fake.init.side_effect = error
    run.log.side_effect = [None, BrokenPipeError("service\ndied")]
    run.finish.side_effect = RuntimeError("cannot finish")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1), None])
def test_a_failure_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException | None
) -> None:
    fake = fake_wandb(monkeypatch, error)
    with mirror("offline", tmp_path) as broken:
        for n in (1, 2, 3):
            broken.write(record(n))
    (said,) = warnings(caplog)
    assert ("service died" if error is None else str(error)) in said
    assert "metrics.jsonl goes on" in said
    sent = [call.args[0]["iteration"] for call in fake.init.return_value.log.call_args_list]
    assert sent == ([1, 2] if error is None else [])


def test_a_failed_training_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fake_wandb(monkeypatch)
    with contextlib.suppress(KeyError), mirror("offline", tmp_path) as opened:
        opened.write(record(1))
        raise KeyError("training")
    fake.init.return_value.finish.assert_called_once_with(exit_code=1)
    assert ["cannot finish" in said for said in warnings(caplog)] == [True]


def test_disabled_writes_nothing_and_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now raises
    with mirror("disabled", tmp_path) as disabled:
        disabled.write(record(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "logged_in", "mode"),
    [("online", False, "offline"), ("auto", True, "online"), ("auto", False, "offline")],
)
def test_where_nobody_is_logged_in_it_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, logged_in: bool, mode: str
) -> None:
    fake = fake_wandb(monkeypatch, logged_in=logged_in)
    mirror(asked, tmp_path)
    assert [call.kwargs["mode"] for call in fake.init.call_args_list] == [mode]
    assert not any(call.kwargs["prompt"] for call in fake.login.call_args_list), "who is asked for a key never trains"
