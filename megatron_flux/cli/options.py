"""Command-line options made from pydantic models: one place for name, type, default and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from megatron_flux.errors import UserError

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print what would run, start nothing.")]


def with_options(*models: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of ``models`` as options; it is called with their values as one dict per model.

    The command's own parameters, after those dicts, stay options of their own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(models) :]

        def call(**values: Any) -> None:
            given = [{name: values[name] for name in model.model_fields} for model in models]
            command(*given, **{p.name: values[p.name] for p in own})

        empty = inspect.Parameter.empty
        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=empty if field.is_required() else field.get_default(call_default_factory=True),
                annotation=Annotated[field.annotation, typer.Option(help=field.description)],
            )
            for model in models
            for name, field in model.model_fields.items()
        ]
        parameters += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.__doc__, call.__name__ = command.__doc__, command.__name__
        return call

    return decorate


def make_options(model: type[BaseModel], values: dict[str, Any]) -> Any:
    """``model(**values)`` with the first problem as a one-line error.

    Raises:
        UserError: a value outside its range.
    """
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + ".".join(str(p) for p in first["loc"]).replace("_", "-")
        raise UserError(f"{name} {first['input']}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
