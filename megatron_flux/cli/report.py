"""``megatron-flux report``: run folders as a page, against earlier results, and in wandb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_flux.cli.start import Group
from megatron_flux.errors import UserError

Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold run folders.", show_default=False)]
Entity = Annotated[str | None, typer.Option(help="wandb team or user; by default the login's own.")]


class LocalByDefault(Group):
    """``report RUN`` means ``report local RUN``; a folder called like a command is given as ``./wandb``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in front of what names none."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["local", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=LocalByDefault,
    no_args_is_help=True,
    help="Show run folders: `report RUN...` writes a page (see `report local --help`); wandb needs a login.",
)


@app.command()
def local(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report; by default the run folder, or one under runs/ for several runs."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Earlier results (a run folder): exit code 1 if the run is outside a band around them."),
    ] = None,
    check: Annotated[str, typer.Option(help="What --against looks at.")] = "step-time,loss,memory",
    step_time_band: Annotated[
        float, typer.Option(min=0, help="Per cent by which a median step time may be longer.")
    ] = 5.0,
    loss_band: Annotated[
        float, typer.Option(min=0, help="Per cent by which a loss may differ from its iteration's earlier one.")
    ] = 1.0,
    memory_band: Annotated[float, typer.Option(min=0, help="Per cent by which peak memory may be larger.")] = 5.0,
) -> None:
    """Write report.html, which needs no network, about one or several run folders."""
    from megatron_flux.metrics import regression
    from megatron_flux.metrics.report import write_reports
    from megatron_flux.run import folder

    if against is not None and len(runs) != 1:
        raise UserError(f"--against compares one run folder, {len(runs)} were given; give one at a time")
    result = None
    if against is not None:
        bands = regression.Bands(step_time_band / 100, loss_band / 100, memory_band / 100)
        result = regression.compare(runs[0], against, bands, regression.parse_checks(check))
    where = out or (runs[0] if len(runs) == 1 else folder.default_folder("report"))
    typer.echo(f"wrote {write_reports(runs, where, lead=result.part() if result else None)}", err=True)
    if result is not None:
        result.show()
        if result.outside:
            raise typer.Exit(1)


@app.command()
def wandb(
    runs: Runs,
    entity: Entity = None,
    project: Annotated[str | None, typer.Option(help="wandb project; by default the one the runs went to.")] = None,
) -> None:
    """Save a workspace and a report in wandb that compare baseline with flux; needs runs that are online."""
    from megatron_flux.metrics import wandb_report

    for url in wandb_report.save(runs, entity=entity, project=project):
        typer.echo(url)
