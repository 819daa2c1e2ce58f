"""The ``megatron-flux`` command. Bad input ends it with one line and exit code 2, a failed run with 1."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from megatron_flux.cli import errors, patch_source, report, slurm, trace
from megatron_flux.cli.bench import bench, tune
from megatron_flux.cli.slurm_plan import plan
from megatron_flux.cli.train import compare, train
from megatron_flux.cli.watch import watch
from megatron_flux.version import __version__

app = typer.Typer(
    cls=errors.Commands,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Fused communication-GEMM tensor parallelism for Megatron.",
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Fused communication-GEMM tensor parallelism for Megatron."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what this machine has, what would be patched, and whether flux can run; exit code 1 if it cannot."""
    from rich.console import Console

    from megatron_flux.telemetry.environment import examine, show

    found = examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        width = None if sys.stdout.isatty() else 160  # rich would fold a pipe at 80 columns
        show(found, Console(highlight=False, emoji=False, markup=False, width=width))
    if not found["ok"]:
        raise typer.Exit(1)


for command in (train, compare, tune, watch, doctor):
    app.command()(command)
slurm.app.command()(plan)
for name, family in {
    "patch-source": patch_source.app,
    "trace": trace.app,
    "slurm": slurm.app,
    "bench": bench,
    "report": report.app,
}.items():
    app.add_typer(family, name=name)


def main() -> None:
    """Entry point of ``megatron-flux``."""
    errors.run(app)
