"""The folder of a submitted job, as its script makes it, and what ``megatron-flux slurm status`` says from it.

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
    runs/NAME-JOB/collected.json, .md    all repetitions side by side

Only the state is Slurm's to say. The rest is read here, at any time, also when Slurm has forgotten the job.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics import ARMS, strict_json
from megatron_flux.metrics.recorder import parse_record
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import median_of
from megatron_flux.metrics.watch import STALL_S, STALL_STEPS, duration
from megatron_flux.run.folder import CONFIG, ENDED
from megatron_flux.slurm import queue

RESUMED, SUBMITTED, SCRIPT, COLLECTOR = "resumed", "submitted", "job.sbatch", "collect.sbatch"
START_S = 900.0
"""So long a start may be without a record: pre-flight, tuning, compilation, a big checkpoint."""
_TAIL = 1 << 18
"""Bytes of a growing file that are read from its end."""
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


def jobs(root: Path) -> list[str]:
    """The ids of the jobs that have written into the folder or will: the first, and those that resumed it.

    Raises:
        UserError: as :func:`split`.
    """
    first, resumed = split(root)[1], root / RESUMED
    return [first, *(resumed.read_text().split() if resumed.is_file() else [])]


def repetitions(root: Path) -> list[Repetition]:
    """The runs of a job so far, in order."""
    found = {path.name.removeprefix("rep-"): path for path in root.glob("rep-*") if path.is_dir()}
    order = sorted(found, key=lambda index: (int(index) if index.isdigit() else -1, index))
    return [_repetition(found[index], index) for index in order]


def _repetition(folder: Path, index: str) -> Repetition:
    run = folder / "run"
    last = {arm: _recent(run / arm / "metrics.jsonl")[-1:] for arm in ARMS if (run / arm).is_dir()}
    starts = sorted((path for path in (folder / "logs").glob("*") if path.name.isdigit()), key=lambda p: int(p.name))
    return Repetition(
        folder=folder,
        index=index,
        iterations={arm: records[0]["iteration"] if records else 0 for arm, records in last.items()},
        steps=read_json_object(run / CONFIG)["config"]["steps"] if (run / CONFIG).is_file() else None,
        state=read_json_object(run / ENDED)["state"] if (run / ENDED).is_file() else "not ended",
        starts=len(starts),
        logs=starts[-1] if starts else None,
    )


def describe(root: Path, now: float) -> list[str]:
    """The lines for the job whose folder is ``root`` at the Unix time ``now``.

    Raises:
        UserError: ``root`` is no folder of a job, or Slurm's commands are not here.
    """
    name, first = split(root)
    number = jobs(root)[-1]
    try:
        known = queue.known(number)
    except UserError:
        raise
    except FluxError as error:
        known = queue.Known(states={}, source=f"state unknown: {error}")
    states = ", ".join(dict.fromkeys(known.states.values())) or known.source
    if known.states and known.source != "scontrol":
        states += f" (by {known.source})"
    resumed = f", resumed as {number}" if number != first else ""
    lines = [f"{name} job {first}{resumed}: {states}"]
    for repetition in repetitions(root):
        task = known.states.get(repetition.index, "")
        steps = ", ".join(f"{arm} {n}/{repetition.steps}" for arm, n in repetition.iterations.items())
        said = [repetition.state, f"step {steps}" if steps else "nothing recorded", f"{repetition.starts} start(s)"]
        lines.append(f"  rep-{repetition.index}: {', '.join([*said, task] if task else said)}")
        if without := [line.split()[-1] for line in _text(repetition.folder / "retries").splitlines()]:
            lines.append(f"    retried without {', '.join(without)}")
        state = (task or known.states.get("", "")).split(" ")[0]
        if state == "RUNNING":
            lines += [f"    {line}" for line in [stale(repetition, now)] if line]
        elif repetition.state == "not ended" and state != "PENDING":
            lines += [f"    {line}" for line in cause(repetition)]
    return lines


def cause(repetition: Repetition) -> list[str]:
    """Why the newest start ended: the job's last word or first failure, and what its rank noted; or the last line."""
    logs = repetition.logs
    if logs is None:
        return []
    said = _text(logs / "error")
    if not said:
        failures = sorted(line for file in logs.glob("failures/*/*") for line in _text(file).splitlines())
        said = failures[0].split(" ", 2)[-1] if failures else ""
    lines = [f"cause: {said}"] if said else []
    if noted := _first_note(repetition):
        lines.append(noted)
    if not said and (log := _text(logs / "log")) and (last := _last_line(Path(log))):
        lines.append(f"last line of {log}: {last}")
    return lines or [f"no cause is on record; see {logs}"]


def _first_note(repetition: Repetition) -> str | None:
    """What the rank that failed first in the newest start has noted, and its step; None where no rank could."""
    found = []
    for file in repetition.run.glob("*/failure-rank*.json"):
        try:
            one = strict_json.loads(file.read_text())
            where = f"rank {one['rank']} on {one['host']}, {file.parent.name} step {one['iteration']}"
            found.append((float(one["timestamp"]), " ".join(f"{where}: {one['error']}".split())))
        except (OSError, ValueError, KeyError, TypeError):  # half a file, or of another program
            continue
    began = _began(repetition)
    return min((note for note in found if note[0] >= began), default=(0.0, None))[1]


def stale(repetition: Repetition, now: float) -> str | None:
    """That a run which is said to be running has recorded nothing for much longer than its steps take, if so."""
    began = _began(repetition)
    written, usual = 0.0, 0.0
    for arm in ARMS:
        file = repetition.run / arm / "metrics.jsonl"
        records = _recent(file)[-20:]
        # A run that resumes writes its earlier records anew before it adds to them.
        if records and (records[-1].get("timestamp") or file.stat().st_mtime) >= began:
            written = max(written, file.stat().st_mtime)
            usual = max(usual, median_of(records, "iteration-time") or 0.0)
    if not written:
        silent = now - began
        return f"stale: no record for {duration(silent)} since this start" if began and silent > START_S else None
    silent = now - written
    if silent <= max(STALL_S, STALL_STEPS * usual):
        return None
    return f"stale: no record for {duration(silent)}, a step usually takes {duration(usual)}; see {repetition.logs}"


def _began(repetition: Repetition) -> float:
    """When the newest start began: its first file is written then, and once; 0 before the first start."""
    if repetition.logs is None:
        return 0.0
    first = repetition.logs / "log"
    return (first if first.is_file() else repetition.logs).stat().st_mtime


def _recent(file: Path) -> list[dict[str, Any]]:
    """The last whole records of a file that may be being written; what is no record is left out."""
    found = []
    for line in _tail(file)[:-1] if file.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(parse_record(line))
    return found


def _last_line(file: Path) -> str:
    """The last line of a job's output, or that by which Slurm ended it, a few lines before; empty if it has none."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = [line for raw in _tail(file) if (line := raw.decode(errors="replace").strip())][-20:]
    return next((line for line in reversed(lines) if "error: *** " in line), lines[-1] if lines else "")


def _tail(file: Path) -> list[bytes]:
    """The lines at the end of a file, from the first whole one on; the last is not ended yet, or empty."""
    with file.open("rb") as content:
        begin = max(0, file.stat().st_size - _TAIL)
        content.seek(begin)
        return content.read().split(b"\n")[1 if begin else 0 :]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
