"""Submitting a job, and letting a job that has ended go on in its folder.

A resumed job's script is submitted as it is, from where it was submitted, and told which folder to go on in. It resumes
by itself from the newest checkpoint that it finds there, as it does when Slurm requeues it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics.summary import VARIANTS
from megatron_flux.run.folder import check_writable
from megatron_flux.slurm import queue, status
from megatron_flux.slurm.job import Resolved, check_time
from megatron_flux.train.checkpoint_folder import TRACKER, least_bytes

FOLDER = "MEGATRON_FLUX_JOB_FOLDER"  # the variable by which a job's script is told to go on in a folder that is there


def environment(runs: Path, root: Path | None = None) -> str:
    """Return sbatch's option that hands over the environment and the folders. Raises UserError: one cannot be used."""
    path = str(root or runs)
    # Between quotes sbatch sees no commas: the folder of a resumed job would be part of the one of all jobs.
    if not path.isprintable() or set(path) & set(",'\""):
        raise UserError(f"--runs {path!r}: commas, quotes, line breaks and control characters are not allowed")
    check_writable(runs, "--runs")
    return f"--export=ALL,MEGATRON_FLUX_RUNS={runs},{FOLDER}={root or ''}"


def save_on_signal(resolved: Resolved) -> str:
    """Say how large the checkpoint on the time limit's signal is, and what bandwidth its seconds need."""
    nbytes, lead = least_bytes(resolved.run), resolved.profile.signal_seconds
    return (
        f"saves {nbytes / 1e9:,.1f} GB on the signal, {lead} s ahead of the time limit: that needs "
        f"{nbytes / 1e9 / lead:,.1f} GB/s of the folder of runs, or more signal_seconds in the profile"
    )


@contextmanager
def _beside(number: str) -> Iterator[None]:
    """Name the job that is submitted already in errors of what follows."""
    try:
        yield
    except (FluxError, OSError) as error:
        raise FluxError(f"job {number} is submitted, but not all beside it: {error}") from None


def check_paths(resolved: Resolved) -> None:
    """Refuse missing paths of profile and data. Where their folder is missing too, compute nodes may see them."""
    venv, container = resolved.profile.venv, resolved.profile.container
    if container is None:
        places = [("data", str(path)) for path in resolved.run.data if not os.path.exists(f"{path}.bin")]
        places += [("venv", venv)] if venv is not None else []
    else:
        places = [("mount", mount.partition(":")[0]) for mount in container.mounts]
        places += [("image", container.image)] if container.image.startswith("/") else []  # or one in a registry
    for name, place in places:
        if not os.path.exists(place) and os.path.isdir(Path(place).absolute().parent):
            raise UserError(f"{name} {Path(place).absolute()} is missing; give a path that is there")


def submit(script: str, runs: Path, own: Sequence[str] = ()) -> tuple[str, Path]:
    """Submit a job's script with the options ``own``; return the job's id and folder."""
    exported = environment(runs)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / status.SCRIPT
        file.write_text(script)
        number = queue.submit(file, [exported, *own])
    root = runs / f"{directive(script, 'job-name')}-{number}"
    with _beside(number):
        root.mkdir(parents=True, exist_ok=True)
        (root / status.SCRIPT).write_text(script)
        if not (root / status.SUBMITTED).exists():  # else the job has begun, and knows more
            (root / status.SUBMITTED).write_text(f"{Path.cwd()}\n")
    return number, root


def directive(script: str, name: str) -> str:
    """Return the value of a script's ``#SBATCH --name=``; empty where it has none."""
    begin = f"#SBATCH --{name}="
    return next((line.removeprefix(begin) for line in script.splitlines() if line.startswith(begin)), "")


class Resumption(NamedTuple):
    """A job that is to go on in its folder."""

    root: Path
    options: tuple[str, ...]  # of sbatch
    cwd: Path
    begins: dict[str, str]  # what each repetition begins with, in words


def resumption(root: Path, changes: dict[str, str | None], *, from_start: bool) -> Resumption:
    """Plan how the job of the folder ``root`` resumes from its checkpoints; ``changes`` are options of sbatch, by name.

    With ``from_start``, repetitions that have recorded steps and no checkpoint begin anew.

    Raises:
        UserError: the job has not ended or is complete, would lose such steps, or its script is missing.
        FluxError: Slurm does not answer.
    """
    root = root.absolute()
    given = {name: value for name, value in changes.items() if value is not None}
    for number in status.jobs(root):
        for state in queue.job_states(number).active.values():
            what = f"job {number} of {root} has not ended, it is {state}"
            raise UserError(f"{what}; wait for it, or scancel {number} first")
    try:
        script = (root / status.SCRIPT).read_text()
        submitted, *site_lines = (root / status.SUBMITTED).read_text().splitlines()
    except (OSError, ValueError):
        raise UserError(
            f"{root} does not hold {status.SCRIPT} and {status.SUBMITTED}; to go on "
            f"in it, submit its script by sbatch --export=ALL,{FOLDER}={root}"
        ) from None
    if not Path(submitted).is_dir():
        raise UserError(f"{root} was submitted in {submitted}, which is no folder any more; restore it or submit anew")
    if "time" in given:
        check_time(given["time"], int(directive(script, "signal").rpartition("@")[2]))
    begins = _begins(root, script, from_start=from_start)
    # An account or QOS that was not given has an empty line.
    earlier = {name: value for name, _, value in (line.partition("=") for line in site_lines) if value}
    given = {name: value for name, value in earlier.items() if not directive(script, name)} | given
    own = queue.after(given.pop("dependency")) if "dependency" in given else []
    words = [f"--{name}={value}" for name, value in given.items()]
    if directive(script, "array"):
        words.append(f"--array={','.join(begins)}%1")
    return Resumption(root, (*words, *own), Path(submitted), begins)


def resume(what: Resumption) -> str:
    """Submit it; return the job's id."""
    exported = environment(what.root.parent, what.root)
    number = queue.submit(what.root / status.SCRIPT, [exported, *what.options], cwd=what.cwd)
    with _beside(number), (what.root / status.RESUMED).open("a") as resumed:
        resumed.write(f"{number}\n")
    return number


def _begins(root: Path, script: str, *, from_start: bool) -> dict[str, str]:
    there = {repetition.index: repetition for repetition in status.repetitions(root)}
    array = re.match(r"0-(\d+)", directive(script, "array"))
    indices = [str(i) for i in range(int(array[1]) + 1)] if array else ["0"]
    unfinished = [index for index in indices if index not in there or there[index].state != "finished"]
    if not unfinished:
        done = f"all of its {len(indices)} repetition(s) are finished"
        raise UserError(f"{root} has completed, {done}; nothing is left to resume")
    is_comparison = directive(script, "job-name").endswith("-compare")
    steps = {index: _checkpoint(root / f"rep-{index}" / "checkpoints", is_comparison) for index in unfinished}
    # A repetition that has recorded nothing has nothing to lose.
    begun = [index for index in unfinished if index in there and any(there[index].files.last.values())]
    anew = [index for index in begun if steps[index] is None]
    if anew and not from_start:
        which = ", ".join(f"rep-{index}" for index in anew)
        raise UserError(
            f"{root}: {which} has no checkpoint and would begin anew at step 0; give --from-start to let it (and "
            "--set save_interval=... to a job that shall save on its way)"
        )
    return {index: "begins" if (step := steps[index]) is None else f"goes on from step {step}" for index in unfinished}


def _checkpoint(folder: Path, is_comparison: bool) -> str | None:
    """Return the newest checkpoint's step, of both variants where there are two; None where one is missing."""
    found = [
        status.text(part / TRACKER)
        for part in ([folder / variant for variant in VARIANTS] if is_comparison else [folder])
    ]
    return "/".join(dict.fromkeys(found)) if all(found) else None
