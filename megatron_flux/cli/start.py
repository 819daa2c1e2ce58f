"""How commands begin: options from pydantic models, the run described, its folder made, its ranks started.

    if start.described(dry_run, describe, out): return              # checks the folder; a dry run ends here
    start.on_ranks(command, about, module, argument, ranks, left=...)

Under a launcher of the user's own (torchrun, srun) each process is a rank, and does its work here.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console

from megatron_flux.errors import UserError
from megatron_flux.run import folder, launcher, rank

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would run, start nothing.")]

Describe = Callable[[Path], dict[str, Any]]
"""What ``--dry-run`` prints and a run folder's ``config.json`` holds, for a run in that folder."""


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of the models among its parameters as options; it is called with the models made.

    Other parameters stay options of their own. A value outside its range is one line.
    """
    own = inspect.signature(command, eval_str=True).parameters
    models = {name: p.annotation for name, p in own.items() if inspect.isclass(p.annotation)}

    def call(**values: Any) -> None:
        for name, model in models.items():
            values[name] = _made(model, {field: values.pop(field) for field in model.model_fields})
        command(**values)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True),
            annotation=Annotated[field.annotation, typer.Option(help=field.description)],
        )
        for model in models.values()
        for name, field in model.model_fields.items()
    ]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name not in models]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call


def _made(model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + ".".join(str(p) for p in first["loc"]).replace("_", "-")
        raise UserError(f"{name} {first['input']}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def report_console() -> Console:
    """For tables and paragraphs; rich would fold a pipe at 80 columns."""
    return Console(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 160)


def described(
    dry_run: bool, describe: Describe, out: Path | None, *, overwrite: bool = False, resuming: bool = False
) -> bool:
    """Whether this is a dry run, whose description is printed; before that the folder ``out``, if any, is checked.

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


def benchmark(
    command: str,
    module: ModuleType,
    about: str,
    ranks: int,
    *,
    describe: Describe,
    argument: Callable[[Path], str],
    out: Path | None,
    overwrite: bool,
    dry_run: bool,
) -> Path | None:
    """Run a benchmark in a folder of its own (``out``, or one that is named after it); None after a dry run.

    ``argument`` of ``module.work`` is made behind all checks; the rest is as in :func:`described` and :func:`on_ranks`.
    """
    made = out or folder.default_folder(*command.split())
    if described(dry_run, describe, made, overwrite=overwrite):
        return None
    if out is None and not launcher.launched():
        made = folder.claim(made)
    if rank.is_first():
        folder.make(made, describe(made), overwrite=overwrite)
    left = f"what was measured is in {made}"
    on_ranks(command, f"{about}, run folder {made}", module, argument(made), ranks, left=left)
    return made


def on_ranks(
    command: str,
    about: str,
    module: ModuleType,
    argument: str,
    ranks: int,
    *,
    left: str,
    here: Callable[[], None] | None = None,
    pass_on: str | None = None,
) -> None:
    """Start ``ranks`` processes that call ``module.work(argument)``; on a rank that a launcher started, be that rank.

    ``about``, what runs where, is printed ahead of it. ``left`` are the last words of an error: what a failed run
    leaves, and where. ``here`` is a rank's work under a launcher, instead of ``module.work(argument)``. ``pass_on`` is
    as in :func:`megatron_flux.run.launcher.launch`.
    """
    if not launcher.launched():
        typer.echo(f"megatron-flux {command}: {about}", err=True)
        launcher.launch(module.__name__, argument, ranks, left=left, pass_on=pass_on)
    elif here is not None:
        here()
    else:
        module.work(argument)
