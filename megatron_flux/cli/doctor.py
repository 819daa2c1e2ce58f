"""``megatron-flux doctor``."""

from __future__ import annotations

import json
import sys

from megatron_flux.options import Options, option


class DoctorOptions(Options):
    """Options of ``doctor``."""

    json_: bool = option(False, "Print JSON.")


def doctor(options: DoctorOptions) -> None:
    """Say what this machine has and whether flux can run (exit code 1: it cannot)."""
    from rich.console import Console

    from megatron_flux.telemetry import environment

    found = environment.examine()
    if options.json_:
        print(json.dumps(found, indent=2))
    else:
        # rich would fold a pipe at 80 columns.
        width = None if sys.stdout.isatty() else 160
        environment.show(found, Console(highlight=False, emoji=False, markup=False, width=width))
    if not found["ok"]:
        raise SystemExit(1)
