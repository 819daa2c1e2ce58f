"""The folder of a submitted job, as its script makes it, and what ``megatron-flux slurm status`` says of it.

::

    runs/NAME-JOB/job.sbatch             the script
    runs/NAME-JOB/submitted              where it was submitted, and to which partition, account and QOS
    runs/NAME-JOB/resumed                the ids of the jobs that went on in this folder, a line each
    runs/NAME-JOB/rep-0/run/             a run folder: records, summary, report
    runs/NAME-JOB/rep-0/checkpoints/
    runs/NAME-JOB/rep-0/retries          a line for each retry: steps of the failure, nodes left out from then on
    runs/NAME-JOB/rep-0/logs/0/          logs of the first start: one per step and node, pre-flight reports, failures;
                                         `error` is the job's last word, `log` names the file of its output

Only the state is Slurm's to say. Repetitions are comparisons of their own: the spread of their speed-ups is what
another run of the job may show; the interval within one is about its own blocks.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics.run_files import RunFiles, ended
from megatron_flux.metrics.summary import median, median_of
from megatron_flux.metrics.table import relative
from megatron_flux.metrics.watch import RECENT, activity
from megatron_flux.run.folder import ENDED
from megatron_flux.slurm import queue

RESUMED, SUBMITTED, SCRIPT = "resumed", "submitted", "job.sbatch"
_FAILURE = re.compile(r"(\d+) (\d+(?:\.\d+)?) (.+)")  # megatron_flux.run.node
_NEWEST = 1 << 18  # bytes of records or output: a folder may hold many long runs
_FOLDER = re.compile(r"(?P<name>.+)-(?P<job>\d+)")


@dataclass(frozen=True)
class Repetition:
    """One run of a job."""

    index: str
    files: RunFiles  # of the run folder
    state: str  # `finished`, `stopped` (on a signal, to be continued), or `not ended`
    starts: int
    logs: Path | None  # of the newest start


def split(root: Path) -> tuple[str, str]:
    """Return the name and id of the job whose folder is ``root``; a :class:`UserError` if it is no job's."""
    found = _FOLDER.fullmatch(root.resolve().name)
    if found is None or not root.is_dir():
        raise UserError(f"{root} is no folder of a job; give runs/NAME-JOB as the job's script made it")
    return found["name"], found["job"]


def all_jobs(runs: Path) -> list[Path]:
    """List the folders of jobs in ``runs``, the newest job last."""
    folders = [path for path in runs.glob("*-*") if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))


def jobs(root: Path) -> list[str]:
    """Return the ids of the folder's jobs: the first, and those that resumed it."""
    return [split(root)[1], *text(root / RESUMED).split()]


def repetitions(root: Path) -> list[Repetition]:
    """Return the runs of a job so far, in order."""
    found = []
    for folder in root.glob("rep-*"):
        if not (index := folder.name.removeprefix("rep-")).isdigit():
            continue
        files = RunFiles(folder / "run", at_most=_NEWEST)
        state = str(files.read(ENDED).get("state", "not ended"))
        starts = [path for path in (folder / "logs").glob("*") if path.name.isdigit()]
        newest = max(starts, key=lambda path: int(path.name), default=None)
        found.append(Repetition(index, files, state, len(starts), newest))
    return sorted(found, key=lambda one: int(one.index))


def describe(root: Path, now: float) -> list[str]:
    """Describe the job whose folder is ``root`` at the Unix time ``now``, in lines."""
    name, first = split(root)
    number = jobs(root)[-1]
    try:
        known = queue.job_states(number)
    except UserError:
        raise
    except FluxError as error:
        known = queue.JobStates(states={}, source=f"state unknown: {error}")
    states = ", ".join(dict.fromkeys(known.states.values())) or known.source
    if known.states and known.source != "controller":
        states += f" (by {known.source})"
    resumed = f", resumed as {number}" if number != first else ""
    lines, begun, speedups = [f"{name} job {first}{resumed}: {states}"], repetitions(root), []
    if known.states and not known.active and not begun:
        submitted = Path(text(root / SUBMITTED).partition("\n")[0])
        lines += [f"    last line of {log}: {_last_line(log)}" for log in submitted.glob(f"{name}-{number}*.log")]
    for repetition in begun:
        task, total = known.states.get(repetition.index, ""), repetition.files.settings.get("steps")
        steps = ", ".join(f"{variant} {n}/{total}" for variant, n in repetition.files.last.items())
        parts = [repetition.state if repetition.state == "not ended" else ended(repetition.state)]
        parts += [f"step {steps}" if repetition.files.exists else "nothing recorded", f"{repetition.starts} start(s)"]
        lines.append(f"  rep-{repetition.index}: {', '.join([*parts, task] if task else parts)}")
        if without := [line.split()[-1] for line in text(repetition.files.path.parent / "retries").splitlines()]:
            lines.append(f"    retried without {', '.join(without)}")
        state, more = (task or known.states.get("", "")).split(" ")[0], []
        if state == "RUNNING":
            more = [line for line in [doing(repetition, now)] if line]
        elif repetition.state == "not ended" and state != "PENDING":
            more = cause(repetition)
        found = repetition.files.read("summary.json") if repetition.state == "finished" else {}
        more += repetition.files.problems
        if found:
            loss, report = relative(found["max_relative_loss_difference"]), repetition.files.path / "report.html"
            more.append(f"{found['verdict']}; largest relative loss difference {loss}; see {report}")
            speedups += [found["speedup"]] if found["speedup"] is not None else []
        lines += [f"    {line}" for line in more]
    if len(speedups) > 1:
        spread = f"{median(speedups):.3f} ({min(speedups):.3f}…{max(speedups):.3f})"
        lines.append(f"  speed-up of the {len(speedups)} finished repetitions: median {spread}")
    return lines


def cause(repetition: Repetition) -> list[str]:
    """Return why the newest start ended: the job's error, else the first rank's failure, else the log's last line."""
    logs = repetition.logs
    if logs is None:
        return []
    cause = text(logs / "error")
    if not cause:
        lines = [line for file in logs.glob("failures/*/*") for line in text(file).splitlines()]
        failures = [(int(one[1]), float(one[2]), one[3]) for one in map(_FAILURE.fullmatch, lines) if one]
        cause = min(failures)[-1] if failures else ""
    if cause:
        return [f"cause: {cause}"]
    if (log := text(logs / "log")) and (last := _last_line(Path(log))):
        return [f"last line of {log}: {last}"]
    return [f"no cause is on record; see {logs}"]


def doing(repetition: Repetition, now: float) -> str | None:
    """Say what a running job does, as ``watch`` does: its last step, or stalled. None before it begins and after."""
    if repetition.logs is None or repetition.state == "finished":
        return None
    first = repetition.logs / "log"  # the newest start's first file is written as it begins, and once
    began = (first if first.is_file() else repetition.logs).stat().st_mtime
    written, usual = None, 0.0
    for tail in repetition.files.tails.values():
        records = tail.records[-RECENT:]
        # A run that resumes writes its earlier records anew before it adds to them.
        if records and (records[-1].get("timestamp") or tail.path.stat().st_mtime) >= began:
            written = max(written or 0.0, tail.path.stat().st_mtime)
            usual = max(usual, median_of(records, "iteration-time") or 0.0)
    words, stalled = activity(now, began, written, usual)
    return f"{words}; see {repetition.logs}" if stalled else words


def _last_line(file: Path) -> str:
    """Return the last line of a job's output, or Slurm's error a few lines before; empty if it has none."""
    lines: list[str] = []
    with contextlib.suppress(OSError), file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _NEWEST))  # a job's output may be gigabytes
        lines = log.read().decode(errors="replace").strip().splitlines()[-20:]
    return next((line for line in reversed(lines) if "error: *** " in line), lines[-1] if lines else "")


def text(file: Path) -> str:
    """Read a small file, stripped; empty where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
