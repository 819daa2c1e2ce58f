"""``report --wandb``: what would be saved, by wandb's real objects, and when it is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import wandb

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics.summary import VARIANTS
from megatron_flux.metrics.wandb_report import save
from tests.unit.metrics.report_runs import RESULTS, full_run


def mirrored(folder: Path, project: str = "project-x", mode: str = "online") -> Path:
    run = full_run(folder)
    for variant in VARIANTS:
        (run / variant / "wandb.json").write_text(json.dumps({"id": "x", "project": project, "mode": mode}))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return mirrored(tmp_path / "run")


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(requests, "get", lambda *_, **__: None)
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(default_entity="team"))


@pytest.mark.usefixtures("logged_in")
def test_dashboards(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb_workspaces.reports import v2 as reports
    from wandb_workspaces.workspaces import Workspace

    saved: list[Any] = []
    monkeypatch.setattr(Workspace, "save", lambda self: (saved.append(self), SimpleNamespace(url="workspace"))[1])
    monkeypatch.setattr(reports.Report, "save", lambda self: saved.append(self))
    monkeypatch.setattr(reports.Report, "url", "report")
    assert save([run]) == ["workspace", "report"]
    workspace, document = saved
    assert {(one.entity, one.project) for one in saved} == {("team", "project-x")}
    assert (workspace.name, document.title) == ("megatron-flux group-x", "megatron-flux group-x")
    assert "group-x" in str(workspace.runset_settings.filters)
    grids = [block for block in document.blocks if isinstance(block, reports.PanelGrid)]
    assert [runset.name for grid in grids for runset in grid.runsets] == [*VARIANTS] * len(grids)
    assert "flux 1.1" in str(document.blocks)

    def refuse(_: Any) -> None:
        raise RuntimeError("no\nspace")

    monkeypatch.setattr(Workspace, "save", refuse)
    with pytest.raises(FluxError, match="wandb refused to save in the project project-x: no space"):
        save([run])


@pytest.mark.usefixtures("logged_in")
def test_refused_without_a_login_and_without_a_network(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(UserError, match=r"report --wandb needs a login to https://.*; run `wandb login`"):
        save([run])

    def unreachable(*_: Any, **__: Any) -> None:
        raise requests.ConnectionError("http://user:password@proxy")

    monkeypatch.setattr(requests, "get", unreachable)
    with pytest.raises(UserError, match="which cannot be reached from here") as caught:
        save([run])
    assert "password" not in str(caught.value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="report --wandb needs wandb online, and WANDB_MODE=offline is set"):
        save([run])
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    with pytest.raises(UserError, match="needs wandb-workspaces, which is not installed: pip install wandb-workspaces"):
        save([run])


def test_what_is_not_in_wandb() -> None:
    with pytest.raises(UserError, match="was recorded without wandb"):
        save([RESULTS / "report-cpu-tiny"])
