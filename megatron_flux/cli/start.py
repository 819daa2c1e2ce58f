"""How every command that trains or measures begins: described, its folder made, its ranks started.

    if start.described(dry_run, describe, out):                     # checks the folder; a dry run ends here
        return
    out = start.make_folder(out, describe, default=..., overwrite=...)
    start.on_ranks(command, about, module, argument, ranks, left=...)

Under a launcher of the user's own (torchrun, srun) each process is a rank, and does its work here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from megatron_flux.run import folder, launcher, rank

Describe = Callable[[Path], dict[str, Any]]
"""What ``--dry-run`` prints and a run folder's ``config.json`` holds, for a run in that folder."""


def described(
    dry_run: bool,
    describe: Describe,
    out: Path,
    *,
    writes: bool = True,
    overwrite: bool = False,
    resuming: bool = False,
) -> bool:
    """Whether this is a dry run, whose description is printed; before that ``out`` is checked, if the run ``writes``.

    Raises:
        UserError: the folder is taken.
    """
    if out is not None and rank.is_first():
        folder.check_free(out, overwrite=overwrite, resuming=resuming)
    if dry_run and rank.is_first():
        typer.echo(json.dumps(describe(out or Path()), indent=2))
    if not dry_run and launcher.launched():
        rank.configure_logging()
    return dry_run


def make_folder(out: Path, describe: Describe, *, default: bool, overwrite: bool) -> Path:
    """Make the folder of a benchmark, with its description; where ``out`` is the default, it may get another name."""
    if default and not launcher.launched():
        out = folder.claim(out)
    if rank.is_first():
        folder.make(out, describe(out), overwrite=overwrite)
    return out


def on_ranks(
    command: str,
    about: str,
    module: str,
    argument: str,
    ranks: int,
    *,
    left: str,
    here: Callable[[], None] | None = None,
    pass_on: str | None = None,
) -> None:
    """Start ``ranks`` processes that call ``module.work(argument)``; on a rank that a launcher started, be that rank.

    Args:
        command: its name.
        about: what runs where, for the line that is printed ahead of it.
        module: of the package.
        argument: of its ``work``.
        ranks: processes.
        left: the last words of an error: what a failed run leaves, and where.
        here: a rank's work under a launcher, instead of ``module.work(argument)``.
        pass_on: as for :func:`megatron_flux.run.launcher.launch`.
    """
    if launcher.launched():
        if here is not None:
            here()
        else:
            importlib.import_module(module).work(argument)
        return
    typer.echo(f"megatron-flux {command}: {about}", err=True)
    launcher.launch(module, argument, ranks, left=left, pass_on=pass_on)
