"""``megatron-flux slurm``: job scripts for clusters, their submission, their state and their results."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Job scripts for clusters: render, submit, status, collect.")


@app.callback()
def slurm() -> None:
    """Job scripts for clusters."""
