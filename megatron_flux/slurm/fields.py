"""What a user may put into a job: types of fields, and models that are read from YAML.

Each value is refused here, or inert wherever it ends up. Two kinds of places take values. ``#SBATCH`` lines are read by
Slurm, which knows no quoting that all its versions share: what goes there is held to letters that mean nothing to it.
Everything else is a shell word: any text without control characters is allowed, and the templates quote it.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from megatron_flux.errors import UserError
from megatron_flux.metrics.strict_json import without_secrets

_Model = TypeVar("_Model", bound=BaseModel)


class Checked(BaseModel):
    """Unchangeable, and without other fields than its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def validated(model: type[_Model], what: str, values: dict[str, Any]) -> _Model:
    """``model(**values)``; ``what`` says in an error what the values are.

    Raises:
        UserError: the first thing wrong with them, in one line.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(part if (part := str(p)).isprintable() else ascii(part) for p in first["loc"]) or "its fields"
        message = first["msg"].removeprefix("Value error, ")
        shown = "" if isinstance(first["input"], dict) else f" {first['input']!r}"
        raise UserError(f"{what}: {path}{shown}: {message[0].lower()}{message[1:]}") from None


class FromYaml(Checked):
    """A file of the package's folder ``profiles`` or ``jobs``, or a user's own."""

    @classmethod
    def packaged(cls) -> dict[str, str]:
        """Texts of the files that come with this package, by name."""
        folder = resources.files("megatron_flux.slurm") / f"{cls.__name__.lower()}s"
        files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
        return {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in files}

    @classmethod
    def load(cls, given: str, overrides: dict[str, Any] | None = None) -> Self:
        """The one of this name, or in the file of this path, with ``overrides`` in place of what it says.

        Raises:
            UserError: no such file, not YAML, or not what is allowed: the first problem, with file and field.
        """
        kind, packaged, path = cls.__name__.lower(), cls.packaged(), Path(given)
        if given in packaged:
            text = packaged[given]
        elif path.suffix in (".yaml", ".yml"):
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{kind} {given} cannot be read: {error}") from None
        else:
            raise UserError(f"unknown {kind} {given!r}; use one of {', '.join(packaged)}, or the path of a .yaml file")
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"{kind} {given} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise UserError(f"{kind} {given} must hold fields and values, it holds a {type(values).__name__}")
        return validated(cls, f"{kind} {given}", {**values, **(overrides or {})})


def _matching(pattern: str, allowed: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        # Not `match`, whose $ lets a last newline pass.
        if compiled.fullmatch(value) is None:
            raise ValueError(f"allowed are {allowed}")
        return value

    return AfterValidator(check)


def _printable(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("allowed is text without line breaks or other control characters, not empty")
    return value


def _no_secret(name: str) -> str:
    if secrets_set_in(f"{name}="):
        raise ValueError("looks like a secret's name: set it where you call sbatch, which hands it to the job")
    return name


Name = Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "up to 64 letters, digits, . _ -")]
"""A name that is also part of file names."""

SlurmWord = Annotated[
    str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:/@=+-]{0,255}", "letters, digits and . , : / @ = + - _")
]
"""A partition, an account, a QOS, a reservation, a list of nodes without brackets."""

NodeList = Annotated[str, _matching(r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]{0,1023}", "names of nodes as n[01-16],m3")]

Constraint = Annotated[
    str, _matching(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:&|*()\[\]-]{0,255}", "features joined by & | , * ( ) [ ]")
]

Duration = Annotated[
    str, _matching(r"(\d{1,3}-\d{1,2}(:\d{2}){0,2}|\d{1,6}|\d{1,4}:\d{2}(:\d{2})?)", "minutes, or [days-]h:mm:ss")
]
"""Slurm's forms of a time limit; ``D-H`` and ``M:SS`` too."""


def seconds(duration: str) -> int | None:
    """A :data:`Duration` (M, M:SS, H:MM:SS, D-H, D-H:MM, D-H:MM:SS) in seconds; None for 0, which is no limit."""
    days, dash, rest = duration.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, more = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, more = parts
    else:
        hours, (minutes, more) = 0, (*parts, 0)[:2]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + more or None


Memory = Annotated[str, _matching(r"\d{1,9}[KMGT]?", "0 (all of a node), or a number with K, M, G or T")]

Text = Annotated[str, AfterValidator(_printable)]
"""A variable's value, a description: quoted wherever it goes."""

Value = bool | int | float | Text | list[Text]
"""Of an option of ``megatron-flux train`` or ``compare``."""

Module = Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._+/@:=-]{0,255}", "letters, digits and . _ + / @ : = -")]


Place = Annotated[Text, _matching(r"[^-~].*", "paths and images in full, which begin neither with - nor with ~")]
"""A path, an image, a mount: a word of a command of its own."""

Variable = Annotated[
    str, _matching(r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _, and no digit first"), AfterValidator(_no_secret)
]


def secrets_set_in(line: str) -> list[str]:
    """Variables that a command sets and that are called like a secret."""
    names = re.findall(r"\b([A-Za-z_]\w*)=", line)
    return [name for name in names if not without_secrets({name: ""})]


_BY_SCRIPT = {
    "srun": (
        "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "cpu-bind", "kill-on-bad-exit",
        "wait", "output", "error", "input", "multi-prog", "pty", "jobid", "container-image",
        "container-name", "container-mounts", "container-workdir", "test-only",
    ),
    "sbatch": (
        "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres",
        "mem", "exclusive", "partition", "account", "qos", "reservation", "constraint", "nodelist",
        "exclude", "time", "array", "signal", "requeue", "no-requeue", "open-mode", "output",
        "error", "input", "export", "export-file", "wrap", "dependency", "kill-on-invalid-dep",
        "chdir", "wait", "test-only", "parsable",
    ),
}  # fmt: skip


def _option_of(command: str) -> AfterValidator:
    def check(word: str) -> str:
        found = re.match(r"--([a-z][a-z0-9-]*)(=.|$)", word)
        if found is None:
            raise ValueError(f"an option of {command} is one word, --NAME or --NAME=VALUE")
        # Slurm takes the beginning of a name for the whole.
        taken = [name for name in _BY_SCRIPT[command] if name.startswith(found[1])]
        if taken:
            raise ValueError(f"--{taken[0]} is set by the script or by a field of the profile; leave it out")
        return word

    return AfterValidator(check)


SrunOption = Annotated[Text, _option_of("srun")]
"""A shell word, quoted."""

SbatchOption = Annotated[
    str,
    _matching(r"--[A-Za-z0-9_.,:/@=+&|*()\[\]-]{1,256}", "letters, digits and . , : / @ = + & | * ( ) [ ] - _"),
    _option_of("sbatch"),
]
"""A line of ``#SBATCH``, which knows no quoting."""

_AFTER = r"after(?:any|ok|notok|corr|burstbuffer)?(?::\d+(?:_\d+)?(?:\+\d+)?)+"

Dependency = Annotated[
    str,
    _matching(
        rf"(?:{_AFTER}|singleton)(?:,(?:{_AFTER}|singleton))*|{_AFTER}(?:\?{_AFTER})+",
        "Slurm's forms, such as afterok:123:124, afterany:123,singleton or afterok:1?afterok:2",
    ),
]
"""What a job waits for."""
