"""``megatron-flux report --wandb``: save a workspace and a report in wandb that compare baseline with flux.

Both are made from :data:`SECTIONS`. Saving twice makes new ones: what was changed by hand since is never overwritten.
Runs that were recorded offline are sent by ``wandb sync RUN/*/wandb/offline-run-*`` before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError, UserError, one_line, require
from megatron_flux.metrics.report.run import Run, load_all
from megatron_flux.metrics.schema import COUNTED
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import VARIANTS
from megatron_flux.metrics.wandb_mirror import BASELINE_EXPOSED, ID_FILE, PROJECT

logger = logging.getLogger("megatron_flux")

LOGIN_TIMEOUT_S = 15


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
        "Baseline's: the same calls serially (ms per step)": _by_operator(BASELINE_EXPOSED),
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


def _logged_in() -> Any:
    """Return the module ``wandb``, logged in to a server that answers. Raises UserError: it cannot, with what to do."""
    require("wandb", "report --wandb")
    import requests
    import wandb

    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        raise UserError(f"report --wandb needs wandb online, and WANDB_MODE={mode} is set; unset it")
    url = wandb.setup().settings.base_url
    try:
        requests.get(url, timeout=LOGIN_TIMEOUT_S)
        if wandb.login(prompt=False, timeout=LOGIN_TIMEOUT_S):
            return wandb
    except requests.RequestException as error:
        # The exception's text repeats the address and, with a proxy, its credentials.
        why = f"which cannot be reached from here ({type(error).__name__}); run it where there is a network"
        raise UserError(f"report --wandb needs {url}, {why}") from None
    except Exception as error:
        why = f"{one_line(error)}; run `wandb login --relogin`"
        raise UserError(f"report --wandb could not log in to {url}: {why}") from None
    raise UserError(f"report --wandb needs a login to {url}, and there is none; run `wandb login`")


def save(paths: Sequence[Path]) -> list[str]:
    """Save one workspace and one report about training runs that are in wandb, and return their addresses.

    They go to the project that the runs were recorded for, of WANDB_ENTITY or the login's own.
    """
    runs = load_all(paths)
    project, groups = _where(runs)
    require("wandb_workspaces", "report --wandb")
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    wandb = _logged_in()
    name = f"megatron-flux {', '.join(groups)}"
    # The library parses this as Python; given as objects it would quote names with an apostrophe wrongly.
    in_groups = f"Metric('Group') in {groups!r}"
    sections: dict[str, list[Any]] = {
        title: [reports.LinePlot(title=name, x="iteration", y=list(metrics)) for name, metrics in panels.items()]
        for title, panels in SECTIONS.items()
    }
    try:
        where: dict[str, Any] = {"entity": wandb.Api().default_entity, "project": project}
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
        verdicts: list[Any] = [f"{run.name}: {run.verdict}" for run in runs]
        blocks: list[Any] = [reports.H1(text="Stock Megatron against flux"), reports.UnorderedList(items=verdicts)]
        for title, panels in sections.items():
            filters = {variant: f"{in_groups} and Metric('JobType') == '{variant}'" for variant in VARIANTS}
            runsets = [reports.Runset(**where, name=variant, filters=text) for variant, text in filters.items()]
            blocks += [reports.H2(text=title), reports.PanelGrid(runsets=runsets, panels=panels)]
        saved = workspace.save().url
        report = reports.Report(**where, title=name, width="fluid", blocks=blocks)
        report.save()
        return [saved, report.url]
    except Exception as error:
        raise FluxError(f"wandb refused to save in the project {project}: {one_line(error)}") from error


def _where(runs: Sequence[Run]) -> tuple[str, list[str]]:
    """Return the project, and the group of every run: its name if its folder has none."""
    projects = set()
    for run in runs:
        mirrored = [read_json_object(file) for file in sorted(run.path.glob(f"*/{ID_FILE}"))]
        if not mirrored:
            raise UserError(f"{run.path} was recorded without wandb; train with --wandb offline or --wandb online")
        if any(one.get("mode") == "offline" for one in mirrored):
            logger.warning("%s was recorded offline: its curves are empty until `wandb sync` has sent it", run.path)
        projects.add(str(mirrored[0].get("project", PROJECT)))
    if len(projects) > 1:
        raise UserError(f"the runs were recorded for {' and '.join(sorted(projects))}; report one project at a time")
    named = [(run.config.get("wandb"), run.name) for run in runs]
    groups = [str(names.get("group", name)) if isinstance(names, dict) else name for names, name in named]
    return projects.pop(), list(dict.fromkeys(groups))
