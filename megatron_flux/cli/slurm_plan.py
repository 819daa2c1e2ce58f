"""``megatron-flux slurm plan``: predict a job, check its layout rank by rank, or predictions against benchmarks."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from megatron_flux.cli.options import make_options, with_options
from megatron_flux.errors import FluxError, UserError
from megatron_flux.estimate.job import PlanOptions, resolve

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Check = Annotated[
    bool, typer.Option("--check-topology", help="Instead: every rank's groups and flux configuration, without GPUs.")
]
Validate = Annotated[
    bool, typer.Option("--validate", help="Instead: predictions beside the measured layers of --layers.")
]


@with_options(PlanOptions)
def plan(
    options: dict[str, Any], as_json: AsJson = False, check_topology: Check = False, validate: Validate = False
) -> None:
    """Predict step time, exposed communication, utilization and memory of a job, stock and flux. Needs no GPU."""
    from megatron_flux.estimate import layout, measured, prediction, report
    from megatron_flux.run import rank

    rank.quiet_megatron()
    given = make_options(PlanOptions, options)
    console = Console(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 160)
    if check_topology and validate:
        raise UserError("--check-topology and --validate are two commands; give one of them")
    if check_topology:
        job = resolve(given)
        checked = layout.check(job)
        if as_json:
            typer.echo(json.dumps(checked, indent=2))
        else:
            report.show_layout(checked, job, console)
        if checked["problems"]:
            raise FluxError(f"{len(checked['problems'])} problem(s), the first: {checked['problems'][0]}")
        return
    if validate:
        found, show = measured.validate_options(given), report.show_validation
    else:
        found, show = prediction.predict_options(given), report.show
        if given.out is not None:
            report.write(found, given.out)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show(found, console)
    if given.out is not None and not validate:
        typer.echo(f"written: {given.out / 'plan.json'}, {given.out / 'plan.html'}", err=True)
