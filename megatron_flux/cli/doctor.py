"""``megatron-flux doctor``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_flux.cli import start
from megatron_flux.errors import UserError
from megatron_flux.options import Options, option
from megatron_flux.run import launcher


class DoctorOptions(Options):
    """Options of ``doctor``."""

    json_: bool = option(False, "Print JSON.")
    links: bool = option(False, "Measure the links between GPUs: some seconds.")


def doctor(options: DoctorOptions) -> None:
    """Print what this machine has; exit code 1 if flux cannot run."""
    from rich.console import Console

    from megatron_flux.telemetry.environment import examine, show

    found = examine()
    if options.links:
        found["link_speed"] = _link_speed()
    if options.json_:
        print(json.dumps(found, indent=2))
    else:
        # rich would fold a pipe at 80 columns.
        width = None if sys.stdout.isatty() else 160
        show(found, Console(highlight=False, emoji=False, markup=False, width=width))
    if not found["ok"]:
        raise SystemExit(1)


def _link_speed() -> dict[str, Any]:
    """Measure links with one process per GPU, or two without GPUs. Raises UserError: one GPU, or under a launcher."""
    import torch

    from megatron_flux.telemetry import link_report

    gpus = torch.cuda.device_count()
    ranks = launcher.world_size(None, gpus=gpus, otherwise=2)
    if launcher.launched():
        raise UserError("doctor --links starts its own processes; start it without a launcher")
    if ranks < 2:
        raise UserError("doctor --links measures between GPUs, and one is visible; leave it out")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        about = f"measuring the links of {ranks} {'GPUs' if gpus else 'processes, there is no GPU'}"
        left = "the rest of doctor runs without --links"
        start.on_ranks("doctor", about, link_report, str(file), ranks, left=left)
        return json.loads(file.read_text())
