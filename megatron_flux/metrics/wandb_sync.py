"""``megatron-flux report sync``: sends to wandb what was recorded offline. wandb's own command does the sending."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_flux.errors import FluxError
from megatron_flux.metrics.wandb_runs import WandbRun, find, require_login

TIMEOUT_S = 600.0
"""Longest wait for one run: wandb itself tries again for ever."""


STILL_WRITING_S = 300.0
"""A run without an end that was written to this recently may be going on."""

_CUT_OFF = "ends with an incomplete record"


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"not done within {TIMEOUT_S:.0f} s; try again later"
    if done.returncode == 0 and run.online:
        return None
    said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if done.returncode == 0 and any(_CUT_OFF in line for line in said):
        return _CUT_OFF
    errors = [line for line in said if "ERROR" in line or line.startswith("Error")]
    return (errors or said or [f"exit code {done.returncode}"])[-1]
