"""``megatron-flux doctor``."""

from __future__ import annotations

import json
import sys

from megatron_flux.options import Options, option


class DoctorOptions(Options):
    """Options of ``doctor``."""

    json_: bool = option(False, "Print JSON.")


def doctor(options: DoctorOptions) -> None:
    """Print what this machine has; exit code 1 if flux cannot run."""
    from rich.console import Console

    from megatron_flux.telemetry.environment import examine, show

    found = examine()
    if options.json_:
        print(json.dumps(found, indent=2))
    else:
        # rich would fold a pipe at 80 columns.
        width = None if sys.stdout.isatty() else 160
        show(found, Console(highlight=False, emoji=False, markup=False, width=width))
    if not found["ok"]:
        raise SystemExit(1)
