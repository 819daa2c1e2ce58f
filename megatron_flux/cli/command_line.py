"""Read a command's options: words of the command line over ``--set`` over ``--config FILE`` over defaults.

argparse's parser is made from the command's model, with its headings and with errors of one line. Only what was given
reaches the model, whose ``model_fields_set`` tells it from defaults.
"""

from __future__ import annotations

import argparse
import difflib
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megatron_flux import plain_yaml
from megatron_flux.errors import UserError
from megatron_flux.options import (
    Options,
    field_named,
    group_of,
    is_argument,
    is_file_only,
    is_list,
    kinds,
    names,
    read_settings,
    refused,
)

Model = TypeVar("Model", bound=Options)


def read(model: type[Model], words: Sequence[str], *, prog: str, about: str, launches: bool) -> tuple[Model, bool]:
    """Return the options that ``words`` give, and whether this is a dry run.

    A command that ``launches`` a run has ``--config``, ``--set`` and ``--dry-run`` besides its options.

    Raises:
        UserError: a word, file or value that the command does not take, in one line.
        SystemExit: ``--help``, which is printed.
    """
    parser = Parser(model, prog=prog, about=about, launches=launches)
    found, rest = parser.parse_known_args(words)
    if rest:
        parser.error(parser.unknown(rest[0]))
    given = vars(found)
    file, settings, dry_run = None, [], False
    if launches:
        file, settings, dry_run = given.pop("config", None), given.pop("set", []), given.pop("dry_run", False)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    changed = read_settings(settings, model.model_fields)
    if unknown := changed.keys() - model.model_fields.keys():
        name = unknown.pop()
        raise _no_option(f"--set {name}={changed[name]}", name, model)
    for origin, read_there in (
        (f"--config {file}: ", {} if file is None else read_file(file, model)),
        ("--set ", changed),
        ("--", given),
    ):
        values |= read_there
        origins |= dict.fromkeys(read_there, origin)
    try:
        return model(**values), dry_run
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if error.errors()[0]["type"] == "missing":
            parser.error(f"--{name} is required")
        origin = origins[name]
        raise refused(origin + (name.replace("_", "-") if origin == "--" else name), error) from None


class Parser(argparse.ArgumentParser):
    """The parser of one command, whose errors are one line and know what a wrong option may have meant."""

    def __init__(self, model: type[Options], *, prog: str, about: str, launches: bool) -> None:
        usage = "%(prog)s [options]" if launches else None
        super().__init__(prog=prog, description=about, usage=usage, allow_abbrev=False, argument_default=SUPPRESS)
        self.model = model
        self._headings: dict[str, Any] = {}
        for name, field in model.model_fields.items():
            if not is_file_only(field):
                self._add_field(name, field, can_be_off=launches)
        if launches:
            self._add(
                "Run", "--config", type=Path, metavar="FILE", help="Read options from YAML or a run's config.json."
            )
            text = "Any option, also one that only files have; goes over --config. Repeatable."
            self._add("Run", "--set", action="append", metavar="NAME=VALUE", help=text)
            text = "Check everything, print what would run, start nothing."
            self._add("Run", "--dry-run", action="store_true", help=text)

    def _add_field(self, name: str, field: FieldInfo, *, can_be_off: bool) -> None:
        """Add an option. ``can_be_off``: a file may have switched on what the command line switches off."""
        flags = [f"--{option}" for option in names(name, field)]
        how: dict[str, Any] = {"dest": name, "metavar": _metavar(field)}
        if is_argument(field):
            flags = [name]
            how = {"metavar": name.upper(), "nargs": ("+" if field.is_required() else "*") if is_list(field) else None}
        elif bool in kinds(field):
            del how["metavar"]
            how["action"] = (
                "store_true" if field.default is False and not can_be_off else argparse.BooleanOptionalAction
            )
        elif is_list(field):
            how["action"] = "append"
        self._add(group_of(self.model, name), *flags, help=_help(field), **how)

    def _add(self, heading: str, *flags: str, **how: Any) -> None:
        if heading not in self._headings:
            self._headings[heading] = self.add_argument_group(heading)
        self._headings[heading].add_argument(*flags, **how)

    def error(self, message: str) -> NoReturn:
        """Raise a UserError."""
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def unknown(self, word: str) -> str:
        """Say what is wrong with ``word``, and what it may have meant."""
        if not word.startswith("-"):
            return f"unexpected argument: {word}"
        given = word.partition("=")[0]
        if (name := field_named(self.model.model_fields, given.lstrip("-").removeprefix("no-"))) is not None:
            return f"{given} is an option of files: give --set {name}=VALUE"
        near = difflib.get_close_matches(given, self._option_string_actions, 1)
        return f"no such option: {given}" + (f", did you mean {near[0]}?" if near else "")


def _leaves(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [leaf for part in inner for leaf in _leaves(part)] if inner else [annotation]


def _metavar(field: FieldInfo) -> str:
    leaves = _leaves(field.annotation)
    if choices := [leaf for leaf in leaves if isinstance(leaf, str)]:
        return f"{{{','.join(choices)}}}"
    return next(leaf.__name__ for leaf in leaves if isinstance(leaf, type) and leaf is not NoneType).upper()


def _help(field: FieldInfo) -> str:
    default = ",".join(map(str, field.default)) if isinstance(field.default, list) else field.default
    default = "on" if default is True else default
    shown = "" if field.is_required() or default in (None, "", False) else f" [{default}]"
    return f"{field.description}{shown}".replace("%", "%%")


def read_file(file: Path, model: type[Options]) -> dict[str, Any]:
    """Read options by field, unchecked: ``NAME: VALUE`` lines, or a run's ``config.json``. Raises UserError."""
    given = plain_yaml.read(file, f"--config {file}")
    if isinstance(given.get("options"), dict):
        # The run may be another command's: train's --no-flux is nothing to compare.
        given = {word: value for word, value in given["options"].items() if field_named(model.model_fields, word)}
    found = {field_named(model.model_fields, str(word)): (word, value) for word, value in given.items()}
    if None in found:
        raise _no_option(f"--config {file}: {found[None][0]}", str(found[None][0]), model)
    return {str(name): value for name, (_, value) in found.items()}


def _no_option(given: str, word: str, model: type[Options]) -> UserError:
    near = difflib.get_close_matches(word.replace("-", "_"), model.model_fields, 1)
    hint = f"did you mean {near[0]}?" if near else f"use some of: {', '.join(model.model_fields)}"
    return UserError(f"{given} is no option of this command; {hint}")
