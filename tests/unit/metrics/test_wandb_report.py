"""``report --wandb``: wandb's real client with a server on this machine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from megatron_flux.errors import UserError
from megatron_flux.metrics import schema
from megatron_flux.metrics.report.run import load
from megatron_flux.metrics.summary import VARIANTS
from megatron_flux.metrics.wandb_mirror import BASELINE_EXPOSED
from megatron_flux.metrics.wandb_report import SECTIONS, _where, save
from tests.unit.metrics.report_runs import RESULTS, full_run
from tests.unit.metrics.wandb_server import KEY, serving


def mirrored(folder: Path, project: str = "project-x", mode: str = "online") -> Path:
    run = full_run(folder)
    for variant in VARIANTS:
        (run / variant / "wandb.json").write_text(json.dumps({"id": "x", "project": project, "mode": mode}))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return mirrored(tmp_path / "run")


def test_dashboards(run: Path) -> None:
    """In a process of its own: wandb keeps a login for as long as its process lives."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": "/nonexistent", "NETRC": "/nonexistent", "WANDB_API_KEY": KEY}
    with serving() as server:
        command = [sys.executable, "-m", "megatron_flux.cli", "report", str(run), "--wandb"]
        environment["WANDB_BASE_URL"] = server.url
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert KEY not in done.stdout + done.stderr
        addresses = done.stdout.split()
        assert [address.startswith(f"{server.url}/team/project-x") for address in addresses] == [True, True]
        workspace, document = ((view, json.loads(view["spec"])) for view in server.views)
    assert workspace[0]["displayName"] == document[0]["displayName"] == "megatron-flux group-x"
    sections = workspace[1]["section"]["panelBankConfig"]["sections"]
    titles = [panel["config"]["chartTitle"] for section in sections for panel in section["panels"]]
    assert titles == [title for panels in SECTIONS.values() for title in panels]
    assert "group-x" in json.dumps(workspace[1]["section"]["runSets"])
    grids = [block for block in document[1]["blocks"] if block["type"] == "panel-grid"]
    assert len(grids) == len(SECTIONS)
    for grid in grids:
        runsets = grid["metadata"]["runSets"]
        assert [runset["name"] for runset in runsets] == list(VARIANTS)
        for variant, runset in zip(VARIANTS, runsets, strict=True):
            text = json.dumps(runset["filters"])
            assert f'"{variant}"' in text
            assert '"group-x"' in text
    assert "flux 1.1" in json.dumps(document[1]["blocks"])


def test_panels_show_fields_of_the_record() -> None:
    fields = schema.names(schema.StepRecord)
    for metric in (metric for section in SECTIONS.values() for metrics in section.values() for metric in metrics):
        parent = metric.rsplit("/", 1)[0].replace(BASELINE_EXPOSED, "flux/serial_time_ms")
        assert metric in fields or parent in fields, metric


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
def test_refused_without_a_login_and_without_a_network(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        with pytest.raises(UserError, match=f"report --wandb needs a login to {server.url}, .*; run `wandb login`"):
            save([run])
    with pytest.raises(UserError, match=f"report --wandb needs {server.url}, which cannot be reached from here"):
        save([run])
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="report --wandb needs wandb online, and WANDB_MODE=offline is set"):
        save([run])


def test_what_is_not_in_wandb(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="was recorded without wandb"):
        save([RESULTS / "report-cpu-tiny"])
    with pytest.raises(UserError, match="is a benchmark"):
        save([RESULTS / "layer-h200x4-nvlink"])
    other = mirrored(tmp_path / "other", project="project-y", mode="offline")
    with (
        caplog.at_level(logging.WARNING, logger="megatron_flux"),
        pytest.raises(UserError, match="recorded for project-x and project-y; report one project at a time"),
    ):
        save([run, other])
    assert "other was recorded offline: its curves are empty until `wandb sync` has sent it" in caplog.text


def test_the_group_is_the_runs_or_its_name(run: Path) -> None:
    assert _where([load(run)]) == ("project-x", ["group-x"])
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"wandb": None}))
    assert _where([load(run)]) == ("project-x", ["run"])


def test_without_wandb_workspaces(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked: dict[str, Any] = dict.fromkeys(["wandb_workspaces", "wandb_workspaces.reports.v2"])
    for name, module in blocked.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(UserError, match="needs wandb-workspaces, which is not installed: pip install wandb-workspaces"):
        save([run])
