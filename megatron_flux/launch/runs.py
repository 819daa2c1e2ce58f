"""The folder of a submitted job, as its script makes it, and what can be read from it at any time.

::

    runs/NAME-JOB/job.sbatch             the script, if `megatron-flux slurm submit` submitted it
    runs/NAME-JOB/rep-0/run/             a run folder: records, summary, report
    runs/NAME-JOB/rep-0/checkpoints/
    runs/NAME-JOB/rep-0/logs/0/          logs of the first start: one per step and node, pre-flight reports, failures
    runs/NAME-JOB/collected.json, .md    all repetitions together
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_flux.errors import UserError
from megatron_flux.metrics import ARMS
from megatron_flux.metrics.summary import read_json_object
from megatron_flux.run.folder import CONFIG, ENDED

_FOLDER = re.compile(r"(?P<name>.+)-(?P<job>\d+)")


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One run of a job."""

    folder: Path
    index: str
    iterations: dict[str, int]
    """The last recorded step of each arm that has begun."""
    steps: int | None
    """What it trains to; None before it has begun."""
    state: str
    """``finished``, ``stopped`` (on a signal, to be continued), or ``not ended``."""
    starts: int

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "run"


def split(root: Path) -> tuple[str, str]:
    """The job's name and id.

    Raises:
        UserError: ``root`` is no folder of a job.
    """
    found = _FOLDER.fullmatch(root.resolve().name)
    if found is None or not root.is_dir():
        raise UserError(f"{root} is no folder of a job; give runs/NAME-JOB as the job's script made it")
    return found["name"], found["job"]


def all_jobs(runs: Path) -> list[Path]:
    """Folders of jobs in ``runs``, the newest job last."""
    folders = [path for path in runs.glob("*-*") if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))


def repetitions(root: Path) -> list[Repetition]:
    """The runs of a job so far, in order."""
    return [_repetition(path) for path in sorted(root.glob("rep-*"), key=_index) if path.is_dir()]


def _index(path: Path) -> tuple[int, str]:
    number = path.name.removeprefix("rep-")
    return (int(number) if number.isdigit() else -1, number)


def _repetition(folder: Path) -> Repetition:
    run = folder / "run"
    iterations = {arm: _last_iteration(run / arm / "metrics.jsonl") for arm in ARMS if (run / arm).is_dir()}
    steps = read_json_object(run / CONFIG)["config"]["steps"] if (run / CONFIG).is_file() else None
    state = read_json_object(run / ENDED)["state"] if (run / ENDED).is_file() else "not ended"
    starts = len([path for path in (folder / "logs").glob("*") if path.name.isdigit()])
    return Repetition(
        folder=folder,
        index=folder.name.removeprefix("rep-"),
        iterations=iterations,
        steps=steps,
        state=state,
        starts=starts,
    )


def _last_iteration(file: Path) -> int:
    """Of the last whole line: the file is being written while this reads it."""
    if not file.is_file():
        return 0
    with file.open("rb") as record:
        record.seek(max(0, file.stat().st_size - 65536))
        lines = record.read().split(b"\n")[:-1]
    found = re.search(rb'"iteration": ?(\d+)', lines[-1]) if lines else None
    return int(found[1]) if found else 0
