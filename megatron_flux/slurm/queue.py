"""Slurm's own commands: submit scripts, and read the state of jobs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from megatron_flux.errors import FluxError, UserError
from megatron_flux.slurm.profile import matching

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

Dependency = Annotated[  # sbatch checks it further
    str,
    matching(
        r"[a-z][a-z0-9_:,+?]*", "Slurm's forms, such as afterok:123:124, afterany:123,singleton or afterok:1?afterok:2"
    ),
]


@dataclass(frozen=True, kw_only=True)
class JobStates:
    """Slurm's view of a job."""

    states: dict[str, str]
    """States by a task's index (``""`` for an ordinary job), with the reason of waiting or the nodes."""
    source: str  # `controller` or `sacct`; or in words why nothing is known

    @property
    def active(self) -> dict[str, str]:
        """Tasks that run, wait or are just ending. sacct does not count: it may never have seen a job end."""
        found = self.states.items() if self.source == "controller" else ()
        return {index: state for index, state in found if state.split()[0] not in OVER}


def slurm(*words: str, cwd: Path | None = None) -> str:
    """Run one of Slurm's commands in the folder ``cwd``; return its output. A :class:`FluxError` has its words.

    The command does not see the caller's ``SLURM_*``, ``SBATCH_*`` and ``SRUN_*``: they may be a job's options.
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
        message = " ".join((done.stderr or done.stdout).split())
        raise FluxError(f"{words[0]}: {message} (exit code {done.returncode})")
    # `sbatch --test-only` answers on standard error.
    return done.stdout.strip() or done.stderr.strip()


def submit(script: Path, options: Sequence[str], *, cwd: Path | None = None) -> str:
    """Submit ``script`` from the folder ``cwd`` and return the job's id. Errors: as :func:`slurm`."""
    output = slurm("sbatch", "--parsable", *options, "--", str(script), cwd=cwd)
    found = re.search(r"^(\d+)(;\S+)?$", output, re.MULTILINE)  # id, and the cluster's name where there are several
    if found is None:
        raise FluxError(f"sbatch answered {output!r} instead of a job's id")
    return found[1]


def after(dependency: str) -> list[str]:
    """Return sbatch's options for a job that waits for others; an unsatisfiable dependency cancels it."""
    return [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]


def job_states(job: str) -> JobStates:
    """Ask the controller for a job's states, or the accounting where the controller has forgotten it."""
    try:
        output = slurm("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%i|%T|%r|%N")
    except FluxError as error:
        if "Invalid job id" not in str(error):
            raise
        output = ""
    found = {}
    for line in output.splitlines():  # tasks that wait together are one
        number, state, reason, nodes = line.split("|")
        words = state
        if state == "PENDING" and reason != "None":
            words = f"{state} ({reason})"
        elif state == "RUNNING":
            words = f"{state} on {nodes}"
        found[number.partition("_")[2].strip("[]")] = words
    # Without: it ended some time ago (`MinJobAge`), or never was.
    return JobStates(states=found, source="controller") if found else _accounted(job)


def _accounted(job: str) -> JobStates:
    """Ask ``sacct``: the accounting database, or where there is none, the list of completed jobs."""
    why = ""
    for kind in ([], ["--completion"]):
        words = ["sacct", *kind, "--noheader", "--parsable2", "--allocations", f"--jobs={job}"]
        try:
            if found := accounted_states(slurm(*words, "--format=JobID,State,ExitCode")):
                return JobStates(states=found, source="sacct")
            why = why or "sacct has no record of it"
        except FluxError as error:
            why = why or str(error)
    return JobStates(states={}, source=f"no longer known to Slurm ({why})")


def accounted_states(output: str) -> dict[str, str]:
    """Parse sacct's lines of ``JobID|State|ExitCode``; of a requeued job the last line counts."""
    found = {}
    for line in output.splitlines():
        number, state, ended = (*line.split("|"), "", "")[:3]
        number, _, index = number.partition("_")
        if line.count("|") == 2 and number.isdigit():
            status, _, killer = ended.partition(":")
            code = f" (exit code {status})" if status != "0" else ""
            found[index] = state.split(" by ")[0] + (f" (signal {killer})" if killer not in ("", "0") else code)
    return found
