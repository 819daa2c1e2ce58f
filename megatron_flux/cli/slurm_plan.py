"""``megatron-flux slurm plan``: predict a job, check its layout rank by rank, or predictions against benchmarks."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from megatron_flux.cli.options import make_options, with_options
from megatron_flux.errors import FluxError, UserError
from megatron_flux.estimate.options import PlanOptions

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
    from megatron_flux.run import rank

    rank.quiet_megatron()
    given = make_options(PlanOptions, options)
    console = Console(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 160)
    if check_topology and validate:
        raise UserError("--check-topology and --validate are two commands; give one of them")
    if validate:
        _validate(given, console, as_json)
    elif check_topology:
        _check_topology(given, console, as_json)
    else:
        _predict(given, console, as_json)


def _predict(given: PlanOptions, console: Console, as_json: bool) -> None:
    from megatron_flux.estimate import prediction as planning
    from megatron_flux.estimate import report as plan_report
    from megatron_flux.estimate.options import resolve

    calls, layers = _measured(given)
    found = calls or layers
    job = resolve(given, found.device if found else None)
    for measured, option in ((calls, "--ops"), (layers, "--layers")):
        if measured and measured.device.key != job.device.key:
            raise UserError(
                f"{option} was measured on {measured.device.key}, the job is for {job.device.key}; leave out --device "
                "or the file"
            )
    made = planning.predict(
        job,
        planning.inputs(
            job,
            calls=calls,
            layers=layers,
            link_gb_per_s=given.link_gb_per_s,
            network_gb_per_s=given.network_gb_per_s,
            overlap=given.overlap_efficiency,
            host_ms_per_layer=given.host_ms_per_layer,
        ),
    )
    if given.out is not None:
        try:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "plan.json").write_text(json.dumps(made, indent=2) + "\n")
            plan_report.write_page(made, given.out / "plan.html")
        except OSError as error:
            raise UserError(f"--out {given.out} cannot be written: {error.strerror}; give another folder") from None
    if as_json:
        typer.echo(json.dumps(made, indent=2))
    else:
        plan_report.show(made, console)
    if given.out is not None:
        typer.echo(f"written: {given.out / 'plan.json'}, {given.out / 'plan.html'}", err=True)


def _measured(given: PlanOptions) -> tuple[Any, Any]:
    from megatron_flux.estimate.measured import read_layers, read_ops

    calls = read_ops(given.ops) if given.ops else None
    return calls, read_layers(given.layers) if given.layers else None


def _validate(given: PlanOptions, console: Console, as_json: bool) -> None:
    from megatron_flux.estimate import report as plan_report
    from megatron_flux.estimate import validate as plan_validate
    from megatron_flux.estimate.devices import device
    from megatron_flux.estimate.rates import Rates

    calls, layers = _measured(given)
    if layers is None:
        raise UserError("--validate needs measured layers; give --layers with a summary.json of bench layer")
    gpu = device(given.device) if given.device else (calls or layers).device
    checks = plan_validate.validate(Rates(device=gpu, calls=calls), layers)
    memory = plan_validate.validate_memory(layers)
    if as_json:
        typer.echo(json.dumps(plan_validate.summary(checks, memory), indent=2))
    else:
        plan_report.show_checks(checks, memory, console)


def _check_topology(given: PlanOptions, console: Console, as_json: bool) -> None:
    from megatron_flux.estimate import layout as topology
    from megatron_flux.estimate import layout_report as topology_report
    from megatron_flux.estimate.options import resolve

    found = topology.check(resolve(given))
    if as_json:
        typer.echo(json.dumps(found.description(), indent=2))
    else:
        topology_report.show(found, console)
    if found.problems:
        raise FluxError(f"{len(found.problems)} problem(s), the first: {found.problems[0]}")
