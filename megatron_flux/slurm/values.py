"""Types of what a user may put into a job: each is refused here, or inert wherever it ends up.

Two kinds of places take values. ``#SBATCH`` lines are read by Slurm, which knows no quoting that all its versions
share: what goes there is held to letters that mean nothing to it. Everything else is a shell word: any text without
control characters is allowed, and the templates quote it.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from megatron_flux.metrics.strict_json import without_secrets


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


def _variable(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise ValueError("a variable's name has letters, digits and _, and begins with no digit")
    if not without_secrets({name: ""}):
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
    """A time limit in seconds; None for Slurm's 0, which means no limit.

    Args:
        duration: a :data:`Duration`: M, M:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS.
    """
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

Module = Annotated[str, _matching(r"[A-Za-z0-9][A-Za-z0-9._+/@:=-]{0,255}", "letters, digits and . _ + / @ : = -")]


def _no_option(value: str) -> str:
    if value.startswith(("-", "~")):
        raise ValueError("a path or an image begins neither with - nor with ~; give it in full")
    return value


Place = Annotated[Text, AfterValidator(_no_option)]
"""A path, an image, a mount: a word of a command of its own."""

Variable = Annotated[str, AfterValidator(_variable)]


SetupLine = Text
"""A command of the profile's owner, for the script's shell: the one kind of text that is run as it is."""


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
