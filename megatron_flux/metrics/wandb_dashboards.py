"""``megatron-flux report wandb``: a workspace and a report that lay baseline and flux beside each other, as code.

They are made from :data:`SECTIONS` and name nothing but fields of the record (:mod:`megatron_flux.metrics.schema`) as
the wandb mirror flattens them, and the curve that it adds. Saving twice makes new ones: what somebody has since changed
by hand is never overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics.report.run import Run, load_all
from megatron_flux.metrics.wandb_runs import find, require_login
from megatron_flux.metrics.wandb_summary import BASELINE_EXPOSED

COMMAND = "report wandb"
OPERATORS = ("all_gather_gemm", "gemm_reduce_scatter")


def _by_operator(field: str) -> tuple[str, ...]:
    return tuple(f"{field}/{operator}" for operator in OPERATORS)


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

COLOURS = {"baseline": "#0072b2", "flux": "#d55e00"}
PER_ROW, WIDTH, HEIGHT = 3, 8, 6


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
    workspaces, reports = _modules()
    wandb = require_login(COMMAND)
    try:
        entity = entity or wandb.Api().default_entity
        saved = workspace(workspaces, entity, project, groups).save().url
        report = document(reports, entity, project, {run.name: run.verdict for run in runs}, groups)
        report.save()
        return [saved, report.url]
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise FluxError(f"wandb refused to save in {entity}/{project}: {cause}") from error


def _modules() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise UserError(f"{COMMAND} needs wandb-workspaces ({error}); `pip install 'megatron-flux[report]'`") from None
    return workspaces, reports


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
            for arm in COLOURS
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
