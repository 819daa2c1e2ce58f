"""``report wandb`` and ``report sync``: real offline files and wandb's real client, with a server on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from megatron_flux.errors import UserError
from megatron_flux.metrics import schema
from megatron_flux.metrics.summary import ARMS
from megatron_flux.metrics.wandb_mirror import BASELINE_EXPOSED, WandbMirror
from megatron_flux.metrics.wandb_online import SECTIONS, save, sync
from tests.unit.metrics.metrics_records import record
from tests.unit.metrics.report_runs import RESULTS, full_run, info
from tests.unit.metrics.wandb_server import KEY, Server, serving


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison mirrored with wandb mode offline."""
    run = full_run(tmp_path_factory.mktemp("wandb") / "run")
    for arm in ("baseline", "flux"):
        settings = info()["config"]
        names = {"project": "project-x", "group": "group-x", "job_type": arm, "name": f"group-x-{arm}"}
        with WandbMirror("offline", settings, run / arm, **names) as mirror:
            for n in range(1, 6):
                mirror.write(record(n, flux=arm == "flux"))
    wandb.teardown()  # waits for wandb's own process, which writes the files
    return run


@pytest.fixture
def run(offline: Path, tmp_path: Path) -> Path:
    return shutil.copytree(offline, tmp_path / "run", symlinks=True)


def report(*words: object, server: Server | None = None, key: str | None = None) -> tuple[int, str, str]:
    """The command in a process of its own: wandb keeps a login for as long as its process lives."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": "/nonexistent", "NETRC": "/nonexistent"}
    if server is not None:
        environment["WANDB_BASE_URL"] = server.url
    if key is not None:
        environment["WANDB_API_KEY"] = key
    command = [sys.executable, "-m", "megatron_flux.cli", "report", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    assert KEY not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def test_sync_then_dashboards(run: Path) -> None:
    # A killed job's file ends within a record.
    (cut,) = (run / "flux").rglob("run-*.wandb")
    os.truncate(cut, cut.stat().st_size - 10)
    os.utime(cut, (0, 0))
    with serving() as server:
        code, output, errors = report("sync", run, server=server, key=KEY)
        assert code == 0, errors
        assert output.count("sent ") == 2
        (line,) = (line for line in output.splitlines() if "without its last record" in line)
        assert cut.parent.name in line
        assert sorted(sent["jobType"] for sent in server.runs.values() if sent.get("jobType")) == ["baseline", "flux"]
        assert sorted(len(lines) for lines in server.history.values()) == [5, 5]
        assert list(sync([run])) == ["2 of 2 runs are in wandb already"]

        code, output, errors = report("wandb", run, server=server, key=KEY)
        assert code == 0, errors
        addresses = output.split()
        assert [address.startswith(f"{server.url}/team/project-x") for address in addresses] == [True, True]
        workspace, document = ((view, json.loads(view["spec"])) for view in server.views)
    assert workspace[0]["displayName"] == document[0]["displayName"] == "megatron-flux group-x"
    panels = [
        panel for section in workspace[1]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]
    ]
    wanted = [title for panels in SECTIONS.values() for title in panels]
    assert [panel["config"]["chartTitle"] for panel in panels] == wanted
    assert "group-x" in json.dumps(workspace[1]["section"]["runSets"])
    grids = [block for block in document[1]["blocks"] if block["type"] == "panel-grid"]
    assert len(grids) == len(SECTIONS)
    for grid in grids:
        runsets = grid["metadata"]["runSets"]
        assert [runset["name"] for runset in runsets] == list(ARMS)
        for arm, runset in zip(ARMS, runsets, strict=True):
            text = json.dumps(runset["filters"])
            assert f'"{arm}"' in text
            assert '"group-x"' in text
    assert "flux 1.1" in json.dumps(document[1]["blocks"])


def test_panels_show_fields_of_the_record() -> None:
    fields = {field.name: field.kind for field in schema.FIELDS}
    for section in SECTIONS.values():
        for metrics in section.values():
            for metric in metrics:
                whole = fields.get(metric)
                part = fields.get(metric.rsplit("/", 1)[0].replace(BASELINE_EXPOSED, "flux/serial_time_ms"))
                assert whole in ("int", "float") or part in ("floats", "counts"), metric


def test_sync_lists_without_a_login(run: Path) -> None:
    lines = list(sync([run], dry_run=True))
    assert [line.split("/")[-1][:12] for line in lines] == ["offline-run-"] * 2


@pytest.fixture
def logged_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb as it begins in a new process that finds no login."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("NETRC", "/nonexistent")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("logged_out")
def test_refused_without_a_login(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with pytest.raises(UserError, match=f"report sync needs a login to {server.url}, .*; run `wandb login`"):
            list(sync([run]))


@pytest.mark.usefixtures("logged_out")
def test_refused_without_a_network(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        pass  # it is gone now
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    for file in run.rglob("run-*.wandb"):
        file.with_suffix(".wandb.synced").touch()
    with pytest.raises(UserError, match=f"report wandb needs {server.url}, which cannot be reached from here"):
        save([run])


def test_refused_when_told_to_stay_offline(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="report sync needs wandb online, and WANDB_MODE=offline is set"):
        list(sync([run]))


def test_dashboards_are_refused_for_what_is_not_in_wandb(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was recorded offline and is not in wandb yet; run `megatron-flux report"):
        save([run])
    with pytest.raises(UserError, match="was recorded without wandb"):
        save([RESULTS / "report-cpu-tiny"])
    with pytest.raises(UserError, match="is a benchmark"):
        save([RESULTS / "layer-h200x4-nvlink"])
    other = full_run(tmp_path / "other", wandb_project="project-y")
    with pytest.raises(UserError, match="the runs were recorded for project-x and project-y; give one as --project"):
        save([run, other])
    with pytest.raises(UserError, match="missing; name a run folder"):
        list(sync([tmp_path / "no"]))


def test_without_wandb_workspaces(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in run.rglob("run-*.wandb"):
        file.with_suffix(".wandb.synced").touch()
    blocked: dict[str, Any] = dict.fromkeys(["wandb_workspaces", "wandb_workspaces.reports.v2"])
    for name, module in blocked.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UserError, match="needs wandb-workspaces, which is not installed: pip install wandb-workspaces"):
        save([run])
