"""Submitting a job with the one that collects it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_flux.errors import FluxError, UserError
from megatron_flux.slurm import queue, runs

FOLDER = "MEGATRON_FLUX_JOB_FOLDER"
"""The variable by which a job's script is told to go on in a folder that is there."""


def environment(runs_folder: Path, root: Path | None = None) -> str:
    """The option of sbatch that hands the submitter's environment to a job, with the folders in it.

    Args:
        runs_folder: of all jobs.
        root: this job's, if it is to go on in one that is there.

    Raises:
        UserError: a path that sbatch would take apart.
    """
    path = str(root or runs_folder)
    if not path.isprintable() or "," in path:
        raise UserError(f"--runs {path!r}: line breaks, control characters and commas are not allowed")
    return f"--export=ALL,MEGATRON_FLUX_RUNS={runs_folder},{FOLDER}={root or ''}"


def collected_after(number: str) -> list[str]:
    """Options of sbatch for a job that begins when the job ``number`` has ended well, and goes when it has not."""
    return [f"--dependency=afterok:{number}", "--kill-on-invalid-dep=yes"]


def submit(script: str, collecting: str, runs_folder: Path, own: Sequence[str] = ()) -> tuple[str, str, Path]:
    """Submit a job's script and the collecting job's; the ids of both, and the job's folder.

    Args:
        script: of the job.
        collecting: the other's.
        runs_folder: where the job makes its folder.
        own: options of sbatch for the job alone.

    Raises:
        UserError, FluxError: as :func:`megatron_flux.slurm.queue.submit`.
    """
    options = [environment(runs_folder)]
    with tempfile.TemporaryDirectory() as scratch:
        file, collector = Path(scratch) / runs.SCRIPT, Path(scratch) / runs.COLLECTOR
        file.write_text(script)
        collector.write_text(collecting)
        number = queue.submit(file, options=[*options, *own])
        root = runs_folder / f"{directive(script, 'job-name')}-{number}"
        try:
            arguments = [str(root)]
            second = queue.submit(collector, options=[*options, *collected_after(number)], arguments=arguments)
            root.mkdir(parents=True, exist_ok=True)
            (root / file.name).write_text(script)
            (root / collector.name).write_text(collecting)
            if not (root / runs.SUBMITTED).exists():  # else the job has begun, and knows more
                (root / runs.SUBMITTED).write_text(f"{Path.cwd()}\n")
        except (FluxError, OSError) as error:
            raise FluxError(f"job {number} is submitted, but not all beside it: {error}") from None
    return number, second, root


def directive(script: str, name: str) -> str:
    """What a script's ``#SBATCH --name=`` says; empty where it has none."""
    begin = f"#SBATCH --{name}="
    return next((line.removeprefix(begin) for line in script.splitlines() if line.startswith(begin)), "")
