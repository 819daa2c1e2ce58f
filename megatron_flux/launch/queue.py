"""Talking to Slurm: submitting scripts, asking for a start time, and the state of jobs. By its own commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatron_flux.errors import FluxError, UserError
from megatron_flux.launch.values import Dependency


def slurm(*words: str) -> str:
    """Run one of Slurm's commands and return what it printed.

    Raises:
        UserError: there is no such command here.
        FluxError: it refused; with its own words.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on this machine; run this where jobs are submitted, or use --dry-run")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - no shell
    if done.returncode != 0:
        raise FluxError(f"{words[0]}: {' '.join((done.stderr or done.stdout).split())} (exit code {done.returncode})")
    # `sbatch --test-only` answers on standard error.
    return done.stdout.strip() or done.stderr.strip()


def submit(script: Path, *, options: list[str], arguments: list[str] | None = None) -> str:
    """Submit ``script`` and return the job's id.

    Raises:
        UserError, FluxError: as :func:`slurm`.
    """
    said = slurm("sbatch", "--parsable", *options, "--", str(script), *(arguments or []))
    found = re.search(r"^(\d+)(;\S+)?$", said, re.MULTILINE)  # id, and the cluster's name where there are several
    if found is None:
        raise FluxError(f"sbatch answered {said!r} instead of a job's id")
    return found[1]


def after(dependency: str) -> list[str]:
    """Sbatch's options for a job that waits for others, and goes when what it waits for can no longer come.

    Raises:
        UserError: that is no dependency.
    """
    try:
        checked = TypeAdapter(Dependency).validate_python(dependency)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"--dependency {dependency!r}: {message}") from None
    return [f"--dependency={checked}", "--kill-on-invalid-dep=yes"]


def when(script: Path, *, options: list[str]) -> str:
    """Where and when ``script`` would start, in Slurm's words; nothing is submitted.

    Raises:
        UserError, FluxError: as :func:`slurm`.
    """
    return slurm("sbatch", "--test-only", *options, "--", str(script))


def states(job: str) -> dict[str, str]:
    """The state of a job's tasks by their index, an ordinary job's under ``""``; empty when Slurm has forgotten it."""
    try:
        shown = slurm("scontrol", "show", "job", job, "--oneliner")
    except FluxError as error:
        if isinstance(error, UserError):
            raise
        return {}
    found = {}
    for line in shown.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        state = fields.get("JobState", "UNKNOWN")
        if state == "PENDING" and fields.get("Reason", "None") != "None":
            state += f" ({fields['Reason']})"
        elif state == "RUNNING":
            state += f" on {fields.get('NodeList', '?')}"
        found[fields.get("ArrayTaskId", "")] = state
    return found
