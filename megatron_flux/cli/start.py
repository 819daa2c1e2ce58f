"""How commands begin: options from pydantic models, the run described, its folder made, its ranks started.

    if start.described(dry_run, describe, out): return              # checks the folder; a dry run ends here
    start.on_ranks(command, about, module, argument, ranks, left=...)

Under a launcher of the user's own (torchrun, srun) each process is a rank, and does its work here.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from signal import Signals
from types import ModuleType
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from megatron_flux.cli import config_file as config_file_of
from megatron_flux.errors import UserError
from megatron_flux.run import folder, launcher, rank

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything, print what would run, start nothing.", rich_help_panel="Run"),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Options from a YAML file, or from a run folder's config.json; those given here go over it.",
        rich_help_panel="Run",
    ),
]

Describe = Callable[[Path], dict[str, Any]]
"""What ``--dry-run`` prints and a run folder's ``config.json`` holds, for a run in that folder."""


class Command(TyperCommand):
    """A command whose help has its options under the headings of their groups, no name cut in any width."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write them; those of no group are the last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if (shown := option.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(shown)
        for name in sorted(groups, key="Options".__eq__):
            with formatter.section(name):
                formatter.write_dl(groups[name])


class Group(TyperGroup):
    """Commands whose list has the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write it."""
        with formatter.section("Commands"):
            commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            formatter.write_dl([(name, found.get_short_help_str(1000)) for name, found in commands.items() if found])


def with_options(command: Callable[..., None], *, config_file: bool = False) -> Callable[..., None]:
    """Give a command the fields of the models among its parameters as options; it is called with the models made.

    Other parameters stay options of their own. A value outside its range is one line. ``config_file``: it also has
    ``--config FILE`` (:mod:`megatron_flux.cli.config_file`), over which its options go, and what was given is set.
    """
    own = inspect.signature(command, eval_str=True).parameters
    kinds = {name: p.annotation for name, p in own.items() if inspect.isclass(p.annotation)}
    models = {name: kind for name, kind in kinds.items() if issubclass(kind, BaseModel)}
    fields = {name: field for model in models.values() for name, field in model.model_fields.items()}

    def call(**values: Any) -> None:
        context, file, given = values.pop("context", None), values.pop("config", None), {}
        said = {name for name in fields if context is None or context.get_parameter_source(name).name == "COMMANDLINE"}
        if file is not None:
            given = config_file_of.read(file, fields, said)
        for name, model in models.items():
            wanted = {field: values.pop(field) for field in model.model_fields}
            wanted = {f: given.get(f, value) for f, value in wanted.items() if f in said or f in given}
            values[name] = _made(model, wanted, dict.fromkeys(given, f"--config {file}: "))
        command(**values)

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True),
            annotation=Annotated[
                field.annotation, typer.Option(help=field.description, rich_help_panel=_group(model, name))
            ],
        )
        for model in models.values()
        for name, field in model.model_fields.items()
    ]
    parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name not in models]
    if config_file:
        parameters += [
            inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile),
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call


with_options_or_file = partial(with_options, config_file=True)


def _group(model: type[BaseModel], field: str) -> str | None:
    """The group of the class that ``field`` was first declared in."""
    declared = next(kind for kind in reversed(model.__mro__) if field in getattr(kind, "model_fields", ()))
    return getattr(declared, "group", None)


def _made(model: type[BaseModel], values: dict[str, Any], origins: Mapping[str, str]) -> BaseModel:
    """``origins``: what an error says ahead of the name, of those that were no options of the command line."""
    try:
        return model(**values)
    except ValidationError as error:
        loc = error.errors()[0]["loc"]
        option, name = loc[0], ".".join(str(p) for p in loc)
        said = f"{origins[str(option)]}{name}" if option in origins else f"--{name.replace('_', '-')}"
        raise refused(said, error) from None


def refused(said: str, error: ValidationError) -> UserError:
    """What is wrong with the value of ``said``, in one line."""
    first = error.errors()[0]
    what = first["msg"].removeprefix("Value error, ").rstrip(".")
    return UserError(f"{said} {first['input']}: {what[0].lower()}{what[1:]}")


def report_console() -> Console:
    """For tables and paragraphs; rich would fold a pipe at 80 columns."""
    return Console(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 160)


def described(
    dry_run: bool,
    describe: Describe,
    out: Path | None,
    *,
    default: bool = False,
    overwrite: bool = False,
    resuming: bool = False,
) -> bool:
    """Whether this is a dry run, whose description is printed; before that the folder ``out``, if any, is checked.

    Not where it is the ``default``: a run of the same second may have it, and this one gets another.

    Raises:
        UserError: the folder is taken.
    """
    if out is not None and not default and rank.is_first():
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
    if described(dry_run, describe, made, default=out is None, overwrite=overwrite):
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
) -> Signals | None:
    """Start ``ranks`` processes that call ``module.work(argument)``; on a rank that a launcher started, be that rank.

    ``about``, what runs where, is printed ahead of it. ``left`` are the last words of an error: what a failed run
    leaves, and where. ``here`` is a rank's work under a launcher, instead of ``module.work(argument)``. ``pass_on`` and
    what is returned are as in :func:`megatron_flux.run.launcher.launch`.
    """
    if not launcher.launched():
        typer.echo(f"megatron-flux {command}: {about}", err=True)
        return launcher.launch(module.__name__, argument, ranks, left=left, pass_on=pass_on)
    if here is not None:
        here()
    else:
        module.work(argument)
    return None
