"""The folder of a submitted job, as its script makes it, and what can be read from it at any time.

::

    runs/NAME-JOB/job.sbatch             the script
    runs/NAME-JOB/collect.sbatch         the one that collects, if `megatron-flux slurm submit` submitted it
    runs/NAME-JOB/submitted              where it was submitted, and to which partition, account and QOS
    runs/NAME-JOB/resumed                the ids of the jobs that went on in this folder, a line each
    runs/NAME-JOB/rep-0/run/             a run folder: records, summary, report
    runs/NAME-JOB/rep-0/checkpoints/
    runs/NAME-JOB/rep-0/retries          a line for each retry: the steps of the failure, the node left out from then on
    runs/NAME-JOB/rep-0/logs/0/          logs of the first start: one per step and node, pre-flight reports, failures;
                                         `error` is the job's last word, `log` names the file of its output
    runs/NAME-JOB/collected.json, .md    all repetitions together
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.metrics import ARMS
from megatron_flux.metrics.recorder import parse_record
from megatron_flux.metrics.summary import read_json_object
from megatron_flux.run.folder import CONFIG, ENDED

RESUMED, SUBMITTED, SCRIPT, COLLECTOR = "resumed", "submitted", "job.sbatch", "collect.sbatch"
_TAIL = 1 << 18
"""Bytes of a record that are read from its end."""
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
    logs: Path | None
    """Of the newest start."""

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


def jobs(root: Path) -> list[str]:
    """The ids of the jobs that have written into the folder or will: the first, and those that resumed it.

    Raises:
        UserError: as :func:`split`.
    """
    _, first = split(root)
    resumed = root / RESUMED
    return [first, *(resumed.read_text().split() if resumed.is_file() else [])]


def recent(file: Path) -> list[dict[str, Any]]:
    """The last whole records of a file that may be being written; what is no record is left out."""
    if not file.is_file():
        return []
    with file.open("rb") as record:
        begin = max(0, file.stat().st_size - _TAIL)
        record.seek(begin)
        lines = record.read().split(b"\n")[1 if begin else 0 : -1]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(parse_record(line))
    return found


def _index(path: Path) -> tuple[int, str]:
    number = path.name.removeprefix("rep-")
    return (int(number) if number.isdigit() else -1, number)


def _repetition(folder: Path) -> Repetition:
    run = folder / "run"
    last = {arm: recent(run / arm / "metrics.jsonl")[-1:] for arm in ARMS if (run / arm).is_dir()}
    iterations = {arm: records[0]["iteration"] if records else 0 for arm, records in last.items()}
    steps = read_json_object(run / CONFIG)["config"]["steps"] if (run / CONFIG).is_file() else None
    state = read_json_object(run / ENDED)["state"] if (run / ENDED).is_file() else "not ended"
    starts = sorted((path for path in (folder / "logs").glob("*") if path.name.isdigit()), key=lambda p: int(p.name))
    return Repetition(
        folder=folder,
        index=folder.name.removeprefix("rep-"),
        iterations=iterations,
        steps=steps,
        state=state,
        starts=len(starts),
        logs=starts[-1] if starts else None,
    )
