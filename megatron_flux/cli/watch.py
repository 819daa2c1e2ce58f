"""``megatron-flux watch``: a run, live, from its records; works over ssh and from another machine's disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="The run folder; it may be about to be made.", show_default=False)],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the table once and end.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the run folder to appear.")] = 60.0,
) -> None:
    """Show a running job's steps until it has done them all (or Ctrl-C); in a pipe, once."""
    from megatron_flux.metrics import watch as watching

    watching.watch(run, interval=interval, once=once, wait=wait)
