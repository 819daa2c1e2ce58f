"""What ``megatron-flux report`` does with wandb's server: sends offline runs (``sync``), saves dashboards (``wandb``).

The dashboards are a workspace and a report that lay baseline and flux beside each other, made from :data:`SECTIONS`.
Saving twice makes new ones: what was changed by hand since is never overwritten.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError, UserError, one_line, require
from megatron_flux.metrics.report.run import Run, load_all
from megatron_flux.metrics.schema import COUNTED
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import ARMS
from megatron_flux.metrics.wandb_mirror import BASELINE_EXPOSED, ID_FILE, PROJECT

LOGIN_TIMEOUT_S = 15
SYNC_TIMEOUT_S = 600.0
"""Longest wait for one run: wandb itself tries again for ever."""
STILL_WRITING_S = 300.0
"""A run without an end that was written to this recently may be going on."""
WITHOUT_END = ".sent-without-end"
"""Ending of the mark beside a run whose process was killed, once what can be read of it was sent."""

_CUT_OFF = "ends with an incomplete record"


def _by_operator(field: str) -> tuple[str, ...]:
    return tuple(f"{field}/{operator}" for operator in COUNTED)


SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Speed": {
        "Step time (s)": ("iteration-time",),
        "Tokens per second": ("tokens-per-second",),
        "TFLOP/s per GPU": ("throughput",),
        "MFU": ("mfu",),
    },
    "Training": {"Loss": ("lm loss",), "Gradient norm": ("grad-norm",), "Learning rate": ("learning-rate",)},
    "Flux operators": {
        "Overlap efficiency": _by_operator("flux/e_overlap"),
        "Exposed communication (ms per step)": _by_operator("flux/exposed_communication_ms"),
        "Baseline's: the same calls in turn (ms per step)": _by_operator(BASELINE_EXPOSED),
        "Received from peers (bytes per step)": ("flux/bytes_received",),
        "Gathered inputs kept for wgrad (bytes)": ("flux/kept_bytes",),
        "Active layers": ("flux/active_layers",),
        "Calls left to stock, per step": ("flux/fallback_calls",),
    },
    "Machine": {
        "Peak memory (bytes)": ("peak-memory-bytes",),
        "Spread of ranks (ms)": ("flux/rank_spread_ms",),
        "Slowest rank": ("flux/slowest_rank",),
        "Slowest SM clock (MHz)": ("flux/gpu/sm_clock_mhz_min",),
        "Largest power (W)": ("flux/gpu/power_w_max",),
    },
}
"""Panels by section: title, and fields of the record (:mod:`megatron_flux.metrics.schema`) as the mirror names them."""


def _find(paths: Sequence[Path]) -> list[Path]:
    """Folder of every wandb run below these folders, oldest first: ``[offline-]run-DATE_TIME-ID``."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is {'no folder' if path.exists() else 'missing'}; name a run folder")
        inner = [file.parent for file in sorted(path.rglob("run-*.wandb"))]
        inner = [folder for folder in inner if folder.name.startswith(("run-", "offline-run-"))]
        if not inner:
            raise UserError(
                f"{path} was recorded without wandb: there is no wandb run below it; "
                "train with --wandb offline or --wandb online"
            )
        found |= {folder.resolve(): folder for folder in inner if not folder.is_symlink()}
    return sorted(found.values(), key=lambda folder: folder.name.removeprefix("offline-"))


def _online(folder: Path) -> bool:
    """The run was sent while it ran, or has been since."""
    sent = [*folder.glob("*.wandb.synced"), *folder.glob(f"*{WITHOUT_END}")]
    return folder.name.startswith("run-") or bool(sent)


def _require_login(command: str) -> Any:
    """The module ``wandb``, logged in to a server that answers; UserError with what to do where ``command`` cannot."""
    require("wandb", command)
    import requests
    import wandb

    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        raise UserError(f"{command} needs wandb online, and WANDB_MODE={mode} is set; unset it")
    url = wandb.setup().settings.base_url
    try:
        requests.get(url, timeout=LOGIN_TIMEOUT_S)
    except requests.RequestException as error:
        # The exception's text repeats the address and, with a proxy, its credentials.
        raise UserError(
            f"{command} needs {url}, which cannot be reached from here ({type(error).__name__}); "
            "run it where there is a network"
        ) from None
    try:
        # It asks the server whether the key is right, where there is one.
        logged_in = wandb.login(prompt=False, timeout=LOGIN_TIMEOUT_S)
    except Exception as error:
        raise UserError(
            f"{command} could not log in to {url}: {one_line(error)}; run `wandb login --relogin`"
        ) from None
    if not logged_in:
        raise UserError(f"{command} needs a login to {url}, and there is none; run `wandb login`")
    return wandb


def sync(
    paths: Sequence[Path], *, entity: str | None = None, project: str | None = None, dry_run: bool = False
) -> Iterator[str]:
    """Send every offline run below the folders that has not been sent; yields a line about each.

    Of a run whose process was killed everything is sent but the record it was writing. FluxError: some could not be
    sent; the others were, and are not sent again.
    """
    runs = _find(paths)
    waiting = [run for run in runs if not _online(run)]
    if len(waiting) < len(runs):
        yield f"{len(runs) - len(waiting)} of {len(runs)} runs are in wandb already"
    if waiting and not dry_run:
        _require_login("report sync")
    options = [*(["--entity", entity] if entity else []), *(["--project", project] if project else [])]
    failed: list[str] = []
    for run in waiting:
        if dry_run:
            yield f"would send {run}"
            continue
        problem = _send(run, options)
        files = list(run.glob("run-*.wandb"))
        if problem is None:
            yield f"sent {run}"
        elif problem != _CUT_OFF:
            failed.append(f"{run} could not be sent: {problem}")
        elif time.time() - max(file.stat().st_mtime for file in files) < STILL_WRITING_S:
            yield f"sent what there is of {run}, which may still be going on: sync it again when it has ended"
        else:
            for file in files:  # wandb's own mark is for runs with an end
                file.with_name(file.name + WITHOUT_END).touch()
            yield f"sent {run} without its last record, which a killed process left incomplete"
    if failed:
        raise FluxError("; ".join(failed))


def _send(run: Path, options: Sequence[str]) -> str | None:
    """Why the run, or the end of it, was not sent; None if it was."""
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *options, str(run)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYNC_TIMEOUT_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"not done within {SYNC_TIMEOUT_S:.0f} s; try again later"
    if done.returncode == 0 and _online(run):
        return None
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if done.returncode == 0 and any(_CUT_OFF in line for line in lines):
        return _CUT_OFF
    errors = [line for line in lines if "ERROR" in line or line.startswith("Error")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def save(paths: Sequence[Path], *, entity: str | None = None, project: str | None = None) -> list[str]:
    """Save one workspace and one report about training runs that are in wandb; returns their addresses.

    ``entity`` (team or user) is by default the login's own, ``project`` the one that the runs were recorded for.
    """
    runs = load_all(paths)
    project, groups = _where(runs, project)
    waiting = [run for run in _find([run.path for run in runs]) if not _online(run)]
    if waiting:
        raise UserError(
            f"{waiting[0]} was recorded offline and is not in wandb yet; "
            f"run `megatron-flux report sync {' '.join(map(str, paths))}` first"
        )
    require("wandb_workspaces", "report wandb")
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    wandb = _require_login("report wandb")
    name = f"megatron-flux {', '.join(groups)}"
    # The library parses this as Python; given as objects it would quote names with an apostrophe wrongly.
    in_groups = f"Metric('Group') in {groups!r}"
    sections = {
        title: [reports.LinePlot(title=name, x="iteration", y=list(metrics)) for name, metrics in panels.items()]
        for title, panels in SECTIONS.items()
    }
    try:
        entity = entity or wandb.Api().default_entity
        where = {"entity": entity, "project": project}
        workspace = workspaces.Workspace(
            **where,
            name=name,
            sections=[
                workspaces.Section(name=title, panels=panels, is_open=True) for title, panels in sections.items()
            ],
            settings=workspaces.WorkspaceSettings(x_axis="iteration"),
            runset_settings=workspaces.RunsetSettings(
                filters=in_groups, groupby=[workspaces.Metric("Group"), workspaces.Metric("JobType")]
            ),
        )
        verdicts = [f"{run.name}: {run.verdict}" for run in runs]
        blocks: list[Any] = [reports.H1(text="Stock Megatron against flux"), reports.UnorderedList(items=verdicts)]
        for title, panels in sections.items():
            filters = {arm: f"{in_groups} and Metric('JobType') == '{arm}'" for arm in ARMS}
            runsets = [reports.Runset(**where, name=arm, filters=text) for arm, text in filters.items()]
            blocks += [reports.H2(text=title), reports.PanelGrid(runsets=runsets, panels=panels)]
        saved = workspace.save().url
        report = reports.Report(**where, title=name, width="fluid", blocks=blocks)
        report.save()
        return [saved, report.url]
    except Exception as error:
        raise FluxError(f"wandb refused to save in {entity}/{project}: {one_line(error)}") from error


def _where(runs: Sequence[Run], project: str | None) -> tuple[str, list[str]]:
    """The project, and the group of every run: its name where its folder does not say."""
    other = next((run for run in runs if run.kind != "training"), None)
    if other is not None:
        raise UserError(f"{other.path} is a benchmark, which wandb has nothing of; name runs of compare or train")
    projects = {_project(run) for run in runs}
    if project is None:
        if len(projects) > 1:
            raise UserError(f"the runs were recorded for {' and '.join(sorted(projects))}; give one as --project")
        project = projects.pop()
    named = [(run.config.get("wandb"), run.name) for run in runs]
    groups = [str(names.get("group", name)) if isinstance(names, dict) else name for names, name in named]
    return project, list(dict.fromkeys(groups))


def _project(run: Run) -> str:
    """The project that a run's arms were mirrored to."""
    for file in sorted(run.path.glob(f"*/{ID_FILE}")):
        with contextlib.suppress(UserError, KeyError):
            return str(read_json_object(file)["project"])
    return str(run.settings.get("wandb_project") or PROJECT)
