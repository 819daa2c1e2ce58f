"""Types of what a user may put into a job: each is refused here, or inert wherever it ends up.

Two kinds of places take values. ``#SBATCH`` lines are read by Slurm, which knows no quoting that all its versions
share: what goes there is held to letters that mean nothing to it. Everything else is a shell word: any text without
control characters is allowed, and the templates quote it.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from megatron_flux.metrics.redact import without_secrets


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
