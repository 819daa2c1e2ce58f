"""``megatron-flux doctor``."""

from __future__ import annotations

import json

from megatron_flux.options import Options, option


class DoctorOptions(Options):
    """Options of ``doctor``."""

    json_: bool = option(False, "Print JSON.")


def doctor(options: DoctorOptions) -> None:
    """Say what this machine has and whether flux can run (exit code 1: it cannot)."""
    from megatron_flux.telemetry import environment

    found = environment.examine()
    if options.json_:
        print(json.dumps(found, indent=2))
    else:
        environment.show(found)
    if not found["ok"]:
        raise SystemExit(1)
