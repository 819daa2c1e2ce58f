"""Talking to Slurm: submitting scripts, asking for a start time, and the state of jobs. By its own commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from megatron_flux.errors import FluxError, UserError
from megatron_flux.slurm.profile import matching

OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "RECONFIG_FAIL", "TIMEOUT"),
)
"""States that a job does not leave by itself. In any other it may still run, or run again."""

_AFTER = r"after(?:any|ok|notok|corr|burstbuffer)?(?::\d+(?:_\d+)?(?:\+\d+)?)+"
Dependency = Annotated[
    str,
    matching(
        rf"(?:{_AFTER}|singleton)(?:,(?:{_AFTER}|singleton))*|{_AFTER}(?:\?{_AFTER})+",
        "Slurm's forms, such as afterok:123:124, afterany:123,singleton or afterok:1?afterok:2",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What Slurm knows of a job."""

    states: dict[str, str]
    """By a task's index, an ordinary job's under ``""``; with the reason of waiting, or the nodes. Empty: nothing."""
    source: str  # who said so, `scontrol` or `sacct`; or in words why nothing is known

    @property
    def active(self) -> dict[str, str]:
        """The tasks that run, wait or are just ending; the accounting's word does not count for that."""
        found = self.states.items() if self.source == "scontrol" else ()
        return {index: state for index, state in found if state.split()[0] not in OVER}


def slurm(*words: str, cwd: Path | None = None) -> str:
    """What one of Slurm's commands printed in the folder ``cwd``; a :class:`FluxError` with its words if it refused."""
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on this machine; run this where jobs are submitted, or use --dry-run")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)  # noqa: S603 - no shell
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise FluxError(f"{words[0]}: {said} (exit code {done.returncode})")
    # `sbatch --test-only` answers on standard error.
    return done.stdout.strip() or done.stderr.strip()


def submit(script: Path, *, options: list[str], arguments: list[str] | None = None, cwd: Path | None = None) -> str:
    """Submit ``script`` from the folder ``cwd`` and return the job's id. Errors: as :func:`slurm`."""
    said = slurm("sbatch", "--parsable", *options, "--", str(script), *(arguments or []), cwd=cwd)
    found = re.search(r"^(\d+)(;\S+)?$", said, re.MULTILINE)  # id, and the cluster's name where there are several
    if found is None:
        raise FluxError(f"sbatch answered {said!r} instead of a job's id")
    return found[1]


def after(dependency: str) -> list[str]:
    """Sbatch's options for a job that waits for others, and goes when what it waits for can no longer come."""
    return [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]


def known(job: str) -> Known:
    """What the controller knows of a job, or where it has forgotten it the accounting; errors as :func:`slurm`."""
    try:
        shown = slurm("scontrol", "show", "job", job, "--oneliner")
    except FluxError as error:
        if "Invalid job id" not in str(error):
            raise
        return _accounted(job)  # it ended some time ago (`MinJobAge`), or never was
    found = {}
    for line in shown.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        state, reason = fields.get("JobState", "UNKNOWN"), fields.get("Reason", "None")
        if state == "PENDING" and reason != "None":
            state += f" ({reason})"
        elif state == "RUNNING":
            state += f" on {fields.get('NodeList', '?')}"
        found[fields.get("ArrayTaskId", "")] = state
    return Known(states=found, source="scontrol")


def _accounted(job: str) -> Known:
    """By ``sacct``: from the accounting's database, or where there is none, from what is noted of jobs as they end."""
    why = []
    for kind in ([], ["--completion"]):
        words = ["sacct", *kind, "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
        try:
            if found := accounted_states(slurm(*words, "--format=JobID,State,ExitCode")):
                return Known(states=found, source="sacct")
            why.append("sacct has no record of it")
        except FluxError as error:
            why.append(str(error))
    return Known(states={}, source=f"no longer known to Slurm ({why[0]})")


def accounted_states(said: str) -> dict[str, str]:
    """The states in lines of ``JobID|State|ExitCode`` of sacct; of a job that was requeued the last line counts."""
    found = {}
    for line in said.splitlines():
        number, state, ended = (*line.split("|"), "", "")[:3]
        number, _, index = number.partition("_")
        if line.count("|") == 2 and number.isdigit():
            status, _, killer = ended.partition(":")
            code = f" (exit code {status})" if status != "0" else ""
            found[index] = state.split(" by ")[0] + (f" (signal {killer})" if killer not in ("", "0") else code)
    return found
