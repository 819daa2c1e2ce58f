"""``megatron-flux trace``: what is done with the traces that ``--profile-steps`` leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_flux.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Traces of profiled runs.")


@app.callback()
def root() -> None:
    """Traces of profiled runs."""


@app.command()
def merge(run: Annotated[Path, typer.Argument(help="Run folder of train or compare with --profile-steps.")]) -> None:
    """Put the traces of all ranks into one file per arm, aligned in time; open it at ui.perfetto.dev."""
    from megatron_flux.telemetry.profiler import merge_run

    if not run.is_dir():
        raise UserError(f"{run} is no folder; give the run folder that was named as --out")
    for file in merge_run(run):
        typer.echo(str(file))
