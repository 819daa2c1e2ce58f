"""Talking to Slurm: submitting scripts, asking for a start time, and the state of jobs. By its own commands."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from megatron_flux.errors import FluxError, UserError
from megatron_flux.slurm.profile import matching

logger = logging.getLogger("megatron_flux")
PATIENCE = 120  # seconds for each of Slurm's commands
_OF_THE_CALLER = ("SLURM_", "SBATCH_", "SRUN_")
_CONNECTION = ("SLURM_CONF", "SLURM_JWT")
LIBRARY = ("MEGATRON_FLUX_JOB_LIBRARY", str(Path(__file__).parent / "lib" / "job.sh"))
"""The variable by which a job's script finds the library that it sources, and this package's."""

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
    source: str  # who said so, `controller` or `sacct`; or in words why nothing is known

    @property
    def active(self) -> dict[str, str]:
        """The tasks that run, wait or are just ending; the accounting's word does not count for that."""
        found = self.states.items() if self.source == "controller" else ()
        return {index: state for index, state in found if state.split()[0] not in OVER}


def slurm(*words: str, cwd: Path | None = None) -> str:
    """What one of Slurm's commands printed in the folder ``cwd``; a :class:`FluxError` with its words if it refused.

    It does not see the caller's ``SLURM_*``, ``SBATCH_*`` and ``SRUN_*``: inside a job they are that job's options.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on this machine; run this where jobs are submitted, or use --dry-run")
    own = {n: v for n, v in os.environ.items() if not n.startswith(_OF_THE_CALLER) or n in _CONNECTION}
    own.setdefault(*LIBRARY)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=cwd, env=own)  # noqa: S603 - no shell
    except subprocess.TimeoutExpired:
        first = "look with squeue --me whether the job is there, then " if words[0] == "sbatch" else ""
        raise FluxError(f"{words[0]}: no answer within {PATIENCE} s; {first}try again") from None
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
    why = _no_json(shutil.which("squeue"), os.environ.get("SLURM_CONF"))
    try:
        found = _shown(job) if why else _queued(job)
    except FluxError as error:
        if "Invalid job id" not in str(error):
            raise
        found = {}
    # Without: it ended some time ago (`MinJobAge`), or never was.
    return Known(states=found, source="controller") if found else _accounted(job)


@cache
def _no_json(squeue: str | None, configuration: str | None) -> str | None:
    """Why ``squeue`` does not speak JSON (before 21.08, or built without), None where it does; each is asked once."""
    try:
        slurm("squeue", "--json", "--version")  # it loads what it needs for JSON, and asks no controller
        return None
    except FluxError as error:
        logger.debug("no JSON of squeue, so scontrol's text is read: %s", error)
        return str(error)


def _queued(job: str) -> dict[str, str]:
    """The states by ``squeue``. JSON of 22.05 is the whole queue whatever is asked for, so others are left out."""
    said = slurm("squeue", "--json", "--states=all", f"--jobs={job}")
    try:
        return queued_states(json.loads(said)["jobs"], int(job))
    except (ValueError, LookupError, TypeError) as error:
        logger.debug("squeue's JSON has a form that is not known here (%r), so scontrol's text is read", error)
        return _shown(job)


def queued_states(jobs: list[dict[str, Any]], job: int) -> dict[str, str]:
    """The states of one job in those of ``squeue --json``: of 22.05, and of the forms since 23.02, and 23.11."""

    def number(value: Any) -> Any:
        return (value["number"] if value["set"] else None) if isinstance(value, dict) else value

    found = {}
    for one in jobs:
        if job not in (number(one["job_id"]), number(one["array_job_id"])):
            continue
        states = one["job_state"] if isinstance(one["job_state"], list) else [one["job_state"]]
        state = next((each for each in states if each not in OVER), states[0])  # of COMPLETED, COMPLETING the latter
        index = number(one["array_task_id"])
        found[one["array_task_string"] if index is None else str(index)] = _in_words(
            state, one["state_reason"], one["nodes"]
        )
    return found


def _shown(job: str) -> dict[str, str]:
    """The states by ``scontrol``, in text."""
    found = {}
    for line in slurm("scontrol", "show", "job", job, "--oneliner").splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        state, reason = fields.get("JobState", "UNKNOWN"), fields.get("Reason", "None")
        found[fields.get("ArrayTaskId", "")] = _in_words(state, reason, fields.get("NodeList", "?"))
    return found


def _in_words(state: str, reason: str, nodes: str) -> str:
    if state == "PENDING" and reason != "None":
        return f"{state} ({reason})"
    return f"{state} on {nodes}" if state == "RUNNING" else state


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
