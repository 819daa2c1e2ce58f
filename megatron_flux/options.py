"""Options of commands, as pydantic models that the command line, ``--config FILE`` and ``--set`` fill.

A field is an option of the same name, with dashes. Where Megatron-LM has a longer word for it (``long``), both are
options, and the field's name is the short form. Options that few look for are ``file_only``: the command line takes
them as ``--set NAME=VALUE``. ``group`` is the heading in ``--help`` of the fields that a class declares; descriptions
are the help texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from megatron_flux.errors import UserError

Fields = Mapping[str, FieldInfo]
_Model = TypeVar("_Model", bound=BaseModel)


def option(default: Any, text: str, *, long: str | None = None, file_only: bool = False, **limits: Any) -> Any:
    """Return a field with this help text; ``limits`` are pydantic's (``ge=1``)."""
    return Field(default, description=text, json_schema_extra={"long": long, "file_only": file_only}, **limits)


def argument(default: Any, text: str) -> Any:
    """Return a field that the command line takes by its place, without a name."""
    return Field(default, description=text, json_schema_extra={"argument": True})


class Checked(BaseModel):
    """Immutable; refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Options(Checked):
    """Options of one command, or a part of them."""

    group: ClassVar[str] = "Options"

    def as_given(self) -> dict[str, Any]:
        """Return the given options, as ``--config`` reads them to repeat a run in another folder."""
        return self.model_dump(mode="json", exclude_unset=True, exclude={"out", "overwrite"})

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Split text for a list at commas, but not paths. Refuse true and false, pydantic's 1 and 0, for numbers."""
        field = cls.model_fields[str(info.field_name)]
        if is_list(field) and isinstance(value, str | list):
            given = [value] if isinstance(value, str) else value
            if list[Path] in kinds(field) or not all(isinstance(word, str) for word in given):
                return given
            return [part.strip() for word in given for part in word.split(",") if part.strip()]
        if isinstance(value, bool) and bool not in kinds(field):
            raise ValueError(f"{str(value).lower()} is no value of this option")
        return value


def kinds(field: FieldInfo) -> tuple[Any, ...]:
    """List the annotation, and the types of a union, or the values of a literal."""
    return (field.annotation, *get_args(field.annotation))


def is_list(field: FieldInfo) -> bool:
    """Return True if the option may be given several times."""
    return any(get_origin(kind) is list for kind in kinds(field))


def is_file_only(field: FieldInfo) -> bool:
    """Return True if the command line has no option of this name."""
    return bool(_extra(field).get("file_only"))


def is_argument(field: FieldInfo) -> bool:
    """Return True if the command line takes the value by its place."""
    return bool(_extra(field).get("argument"))


def names(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the option's names, Megatron-LM's first, with dashes and without ``--``."""
    return tuple(filter(None, (_extra(field).get("long"), name.rstrip("_").replace("_", "-"))))


def field_named(fields: Fields, word: str) -> str | None:
    """Return the field that ``word`` (dashes or underscores) names, by either name."""
    word = word.replace("_", "-")
    return next((name for name, field in fields.items() if word in names(name, field)), None)


def read_settings(pairs: Sequence[str], fields: Fields) -> dict[str, Any]:
    """Read ``--set NAME=VALUE`` words by field; an option that is a list may come again.

    A name that is none of ``fields`` stays, with underscores. Raises UserError: no such pair, or one given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        word, separator, value = pair.partition("=")
        name = field_named(fields, word) or word.replace("-", "_")
        if not pair.isprintable():
            raise UserError(f"--set {pair!r}: line breaks and other control characters are not allowed")
        if not separator or not name:
            raise UserError(f"--set {pair}: give NAME=VALUE, such as timeout=1800")
        if name in fields and is_list(fields[name]):
            found.setdefault(name, []).append(value)
        elif name in found:
            raise UserError(f"--set {name} is given twice; give it once")
        else:
            found[name] = value
    return found


def group_of(model: type[BaseModel], name: str) -> str:
    """Return the heading of the class that first declared the field ``name``."""
    declared = next(kind for kind in reversed(model.__mro__) if name in getattr(kind, "model_fields", ()))
    return str(getattr(declared, "group", Options.group))


def refused(option: str, error: ValidationError) -> UserError:
    """Return the first problem in one line, for the option called ``option``."""
    given = error.errors()[0]["input"]
    shown = ",".join(map(str, given)) if isinstance(given, list) else given
    return UserError(f"{option} {shown}: {_problem(error)}")


def validated(model: type[_Model], what: str, values: dict[str, Any]) -> _Model:
    """Return ``model(**values)``; a UserError names the first wrong field of ``what`` in one line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        parts = [str(part) for part in first["loc"]]
        path = ".".join(part if part.isprintable() else ascii(part) for part in parts) or "its fields"
        shown = "" if isinstance(first["input"], dict) else f" {first['input']!r}"
        quotes = "; put it in quotes" if first["type"] == "string_type" and isinstance(first["input"], bool) else ""
        raise UserError(f"{what}: {path}{shown}: {_problem(error)}{quotes}") from None


def _problem(error: ValidationError) -> str:
    message = error.errors()[0]["msg"].removeprefix("Value error, ").rstrip(".")
    return message[0].lower() + message[1:]


def _extra(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
