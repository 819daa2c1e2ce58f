"""``megatron-flux report sync``: sends to wandb what was recorded offline. wandb's own command does the sending."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_flux.errors import FluxError
from megatron_flux.metrics.wandb_runs import find, require_login

TIMEOUT_S = 600.0
"""Longest wait for one run: wandb itself tries again for ever."""


def sync(
    paths: Sequence[Path], *, entity: str | None = None, project: str | None = None, dry_run: bool = False
) -> Iterator[str]:
    """Send every offline run below the folders that has not been sent; yields a line about each.

    Raises:
        UserError: no wandb run is there, no login, or no network.
        FluxError: sending failed; what was sent before stays sent, and is not sent again.
    """
    runs = find(paths)
    waiting = [run for run in runs if not run.online]
    if len(waiting) < len(runs):
        yield f"{len(runs) - len(waiting)} of {len(runs)} runs are in wandb already"
    if waiting and not dry_run:
        require_login("report sync")
    options = [*(["--entity", entity] if entity else []), *(["--project", project] if project else [])]
    for run in waiting:
        if dry_run:
            yield f"would send {run.folder}"
            continue
        command = [sys.executable, "-m", "wandb", "sync", "--yes", *options, str(run.folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)  # noqa: S603
        except subprocess.TimeoutExpired:
            raise FluxError(f"{run.folder} could not be sent within {TIMEOUT_S:.0f} s; try again later") from None
        if done.returncode or not run.online:
            said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            cause = said[-1] if said else f"exit code {done.returncode}"
            raise FluxError(f"{run.folder} could not be sent: {cause}")
        yield f"sent {run.folder}"
