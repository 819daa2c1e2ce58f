"""What ``megatron-flux report`` does with wandb's server: sends offline runs (``sync``), saves dashboards (``wandb``).

The dashboards are a workspace and a report that lay baseline and flux beside each other, as code. They are made from
:data:`SECTIONS` and name nothing but fields of the record (:mod:`megatron_flux.metrics.schema`) as the mirror flattens
them, and the curve that it adds. Saving twice makes new ones: what was changed by hand since is never
overwritten. wandb's own command does the sending.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics.report.run import Run, load_all
from megatron_flux.metrics.summary import ARMS
from megatron_flux.metrics.wandb_mirror import BASELINE_EXPOSED

LOGIN_TIMEOUT_S = 15.0
SYNC_TIMEOUT_S = 600.0
"""Longest wait for one run: wandb itself tries again for ever."""
STILL_WRITING_S = 300.0
"""A run without an end that was written to this recently may be going on."""
WITHOUT_END = ".sent-without-end"
"""Ending of the mark beside a run whose process was killed, once what can be read of it was sent."""

_CUT_OFF = "ends with an incomplete record"
PER_ROW, WIDTH, HEIGHT = 3, 8, 6
"""Panels in a row, and their size in wandb's grid."""
_OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter")


def _by_operator(field: str) -> tuple[str, ...]:
    return tuple(f"{field}/{operator}" for operator in _OPERATORS)


SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Speed": {
        "Step time (s)": ("iteration-time",),
        "Tokens per second": ("tokens-per-second",),
        "TFLOP/s per GPU": ("throughput",),
        "MFU": ("mfu",),
    },
    "Training": {
        "Loss": ("lm loss",),
        "Gradient norm": ("grad-norm",),
        "Learning rate": ("learning-rate",),
    },
    "Flux operators": {
        "Overlap efficiency": _by_operator("flux/e_overlap"),
        "Exposed communication (ms per step)": _by_operator("flux/exposed_communication_ms"),
        "Baseline's: the same calls in turn (ms per step)": _by_operator(BASELINE_EXPOSED),
        "Received from peers (bytes per step)": ("flux/bytes_received",),
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
"""Panels by section: title and metrics."""


@dataclass(frozen=True)
class WandbRun:
    """One run that wandb wrote below a run folder."""

    folder: Path
    """``run-DATE_TIME-ID`` or ``offline-run-DATE_TIME-ID``."""

    @property
    def online(self) -> bool:
        """It was sent while it ran, or has been since."""
        sent = [*self.folder.glob("*.wandb.synced"), *self.folder.glob(f"*{WITHOUT_END}")]
        return self.folder.name.startswith("run-") or bool(sent)

    @property
    def silent_s(self) -> float:
        """Seconds since wandb last wrote to it."""
        return time.time() - max(file.stat().st_mtime for file in self.folder.glob("run-*.wandb"))

    def mark_sent(self) -> None:
        """Note that all that can be read of it was sent; wandb's own mark is for runs with an end."""
        for file in self.folder.glob("run-*.wandb"):
            file.with_name(file.name + WITHOUT_END).touch()


def find(paths: Sequence[Path]) -> list[WandbRun]:
    """Every wandb run below these folders, oldest first.

    Raises:
        UserError: a folder is missing, or there is no wandb run below it; the message says what to do.
    """
    found: dict[Path, WandbRun] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is {'no folder' if path.exists() else 'missing'}; name a run folder")
        inner = [
            file.parent
            for file in sorted(path.rglob("run-*.wandb"))
            if file.parent.name.startswith(("run-", "offline-run-"))
        ]
        if not inner:
            raise UserError(
                f"{path} was recorded without wandb: there is no wandb run below it; "
                "train with --wandb offline or --wandb online"
            )
        found |= {folder.resolve(): WandbRun(folder) for folder in inner if not folder.is_symlink()}
    return sorted(found.values(), key=lambda run: run.folder.name.removeprefix("offline-"))


def require_login(command: str) -> Any:
    """The module ``wandb``, logged in to a server that answers.

    Args:
        command: what cannot be done otherwise, for the message.

    Raises:
        UserError: wandb is not installed, told to stay offline, not logged in, or its server cannot be reached.
    """
    try:
        import requests
        import wandb
    except ImportError as error:
        raise UserError(f"{command} needs wandb ({error}); `pip install wandb`") from None
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
        logged_in = wandb.login(prompt=False, timeout=int(LOGIN_TIMEOUT_S))
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{command} could not log in to {url}: {cause}; run `wandb login --relogin`") from None
    if not logged_in:
        raise UserError(f"{command} needs a login to {url}, and there is none; run `wandb login`")
    return wandb


def sync(
    paths: Sequence[Path], *, entity: str | None = None, project: str | None = None, dry_run: bool = False
) -> Iterator[str]:
    """Send every offline run below the folders that has not been sent; yields a line about each.

    Of a run whose process was killed everything is sent but the record it was writing.

    Raises:
        UserError: no wandb run is there, no login, or no network.
        FluxError: some could not be sent; the others were, and are not sent again.
    """
    runs = find(paths)
    waiting = [run for run in runs if not run.online]
    if len(waiting) < len(runs):
        yield f"{len(runs) - len(waiting)} of {len(runs)} runs are in wandb already"
    if waiting and not dry_run:
        require_login("report sync")
    options = [*(["--entity", entity] if entity else []), *(["--project", project] if project else [])]
    failed: list[str] = []
    for run in waiting:
        if dry_run:
            yield f"would send {run.folder}"
        elif (problem := _send(run, options)) is None:
            yield f"sent {run.folder}"
        elif problem != _CUT_OFF:
            failed.append(f"{run.folder} could not be sent: {problem}")
        elif run.silent_s < STILL_WRITING_S:
            yield f"sent what there is of {run.folder}, which may still be going on: sync it again when it has ended"
        else:
            run.mark_sent()
            yield f"sent {run.folder} without its last record, which a killed process left incomplete"
    if failed:
        raise FluxError("; ".join(failed))


def _send(run: WandbRun, options: Sequence[str]) -> str | None:
    """Why the run, or the end of it, was not sent; None if it was."""
    command = [sys.executable, "-m", "wandb", "sync", "--yes", *options, str(run.folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYNC_TIMEOUT_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"not done within {SYNC_TIMEOUT_S:.0f} s; try again later"
    if done.returncode == 0 and run.online:
        return None
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if done.returncode == 0 and any(_CUT_OFF in line for line in lines):
        return _CUT_OFF
    errors = [line for line in lines if "ERROR" in line or line.startswith("Error")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def save(paths: Sequence[Path], *, entity: str | None = None, project: str | None = None) -> list[str]:
    """Save one workspace and one report about training runs that are in wandb; returns their addresses.

    Args:
        paths: run folders.
        entity: team or user; by default the login's own.
        project: by default the one that the runs were recorded for.

    Raises:
        UserError: a folder is no training run, was recorded without wandb or has not been sent yet; wandb-workspaces is
            missing; no login or no network.
        FluxError: wandb refused.
    """
    runs = load_all(paths)
    project, groups = _where(runs, project)
    waiting = [run.folder for run in find([run.path for run in runs]) if not run.online]
    if waiting:
        raise UserError(
            f"{waiting[0]} was recorded offline and is not in wandb yet; "
            f"run `megatron-flux report sync {' '.join(map(str, paths))}` first"
        )
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        needs = "report wandb needs wandb-workspaces"
        raise UserError(f"{needs} ({error}); `pip install 'megatron-flux[report]'`") from None
    wandb = require_login("report wandb")
    try:
        entity = entity or wandb.Api().default_entity
        saved = workspace(workspaces, entity, project, groups).save().url
        report = document(reports, entity, project, {run.name: run.verdict for run in runs}, groups)
        report.save()
        return [saved, report.url]
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise FluxError(f"wandb refused to save in {entity}/{project}: {cause}") from error


def _where(runs: Sequence[Run], project: str | None) -> tuple[str, list[str]]:
    """The project, and the group of every run."""
    other = next((run for run in runs if run.kind != "training"), None)
    if other is not None:
        raise UserError(f"{other.path} is a benchmark, which wandb has nothing of; name runs of compare or train")
    projects = {str(run.settings.get("wandb_project")) for run in runs}
    if project is None:
        if len(projects) > 1:
            raise UserError(f"the runs were recorded for {' and '.join(sorted(projects))}; give one as --project")
        project = projects.pop()
    return project, list(dict.fromkeys(map(_group, runs)))


def _group(run: Run) -> str:
    """As ``config.json`` has it; folders of earlier versions were grouped by what was asked for, or by their name."""
    named = run.config.get("wandb")
    if isinstance(named, dict) and named.get("group"):
        return str(named["group"])
    return str(run.settings.get("wandb_group") or Path(str(run.settings.get("out", run.name))).name)


def workspace(workspaces: Any, entity: str, project: str, groups: Sequence[str]) -> Any:
    """The workspace, not saved: runs of ``groups``, grouped by job type (baseline, flux), a panel per metric."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=f"megatron-flux {', '.join(groups)}",
        sections=[
            workspaces.Section(name=name, panels=_panels(panels), is_open=True) for name, panels in SECTIONS.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis="iteration"),
        runset_settings=workspaces.RunsetSettings(
            filters=_in_groups(groups),
            groupby=[workspaces.Metric("Group"), workspaces.Metric("JobType")],
        ),
    )


def document(reports: Any, entity: str, project: str, verdicts: dict[str, str], groups: Sequence[str]) -> Any:
    """The report, not saved: verdicts in words, then every section with baseline and flux as run sets."""
    blocks: list[Any] = [reports.H1(text="Stock Megatron against flux")]
    blocks.append(reports.UnorderedList(items=[f"{name}: {text}" for name, text in verdicts.items()]))
    for section, panels in SECTIONS.items():
        runsets = [
            reports.Runset(
                entity=entity,
                project=project,
                name=arm,
                filters=f"{_in_groups(groups)} and Metric('JobType') == '{arm}'",
            )
            for arm in ARMS
        ]
        blocks += [reports.H2(text=section), reports.PanelGrid(runsets=runsets, panels=_panels(panels))]
    title = f"megatron-flux {', '.join(groups)}"
    return reports.Report(project=project, entity=entity, title=title, width="fluid", blocks=blocks)


def _in_groups(groups: Sequence[str]) -> str:
    # The library parses this as Python; given as objects it would quote names with an apostrophe wrongly.
    return f"Metric('Group') in {list(groups)!r}"


def _panels(panels: dict[str, tuple[str, ...]]) -> list[Any]:
    from wandb_workspaces.reports.v2 import Layout, LinePlot

    return [
        LinePlot(
            title=title,
            x="iteration",
            y=list(metrics),
            layout=Layout(x=WIDTH * (number % PER_ROW), y=HEIGHT * (number // PER_ROW), w=WIDTH, h=HEIGHT),
        )
        for number, (title, metrics) in enumerate(panels.items())
    ]
