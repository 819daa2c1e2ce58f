"""What ``megatron-flux slurm status`` says of a job: its state, how far its runs are, why they ended, and if they live.

Everything but the state is read from the job's folder, so it is there when Slurm has forgotten the job.
"""

from __future__ import annotations

from pathlib import Path

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics import ARMS, strict_json
from megatron_flux.metrics.statistics import median_of
from megatron_flux.metrics.watch import STALL_S, STALL_STEPS, duration
from megatron_flux.slurm import queue, runs

START_S = 900.0
"""So long a start may be without a record: pre-flight, tuning, compilation, a big checkpoint."""
_TAIL = 1 << 16
"""Bytes of a job's output that are read from its end."""


def describe(root: Path, now: float) -> list[str]:
    """The lines for the job whose folder is ``root`` at the Unix time ``now``.

    Raises:
        UserError: ``root`` is no folder of a job, or Slurm's commands are not here.
    """
    name, first = runs.split(root)
    number = runs.jobs(root)[-1]
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
    for repetition in runs.repetitions(root):
        task = known.states.get(repetition.index, "")
        steps = ", ".join(f"{arm} {n}/{repetition.steps}" for arm, n in repetition.iterations.items())
        said = [repetition.state, f"step {steps}" if steps else "nothing recorded", f"{repetition.starts} start(s)"]
        lines.append(f"  rep-{repetition.index}: {', '.join([*said, task] if task else said)}")
        state = (task or known.states.get("", "")).split(" ")[0]
        if state == "RUNNING":
            said = [stale(repetition, now)]
        elif repetition.state == "not ended" and state != "PENDING":
            said = cause(repetition)
        else:
            said = []
        lines += [f"    {line}" for line in [*retried(repetition), *said] if line]
    return lines


def cause(repetition: runs.Repetition) -> list[str]:
    """Why the newest start ended: the job's last word or first failure, and what its rank noted; or the last line."""
    logs = repetition.logs
    if logs is None:
        return []
    said = _text(logs / "error")
    if not said:
        failures = sorted(line for file in logs.glob("failures/*/*") for line in _text(file).splitlines())
        said = failures[0].split(" ", 2)[-1] if failures else ""
    lines = [f"cause: {said}"] if said else []
    noted = note(repetition)
    lines += [noted] if noted else []
    if not said:
        log = _text(logs / "log")
        last = _last_line(Path(log)) if log else ""
        lines += [f"last line of {log}: {last}"] if last else []
    return lines or [f"no cause is on record; see {logs}"]


def note(repetition: runs.Repetition) -> str | None:
    """What the rank that failed first in the newest start has noted, and its step; None where no rank could."""
    found = []
    for file in repetition.run.glob("*/failure-rank*.json"):
        try:
            one = strict_json.loads(file.read_text())
            where = f"rank {one['rank']} on {one['host']}, {file.parent.name} step {one['iteration']}"
            found.append((float(one["timestamp"]), " ".join(f"{where}: {one['error']}".split())))
        except (OSError, ValueError, KeyError, TypeError):  # half a file, or somebody else's
            continue
    since = [one for one in found if one[0] >= _began(repetition)]
    return min(since)[1] if since else None


def retried(repetition: runs.Repetition) -> list[str]:
    """Which nodes retries have left out."""
    nodes = [line.split()[-1] for line in _text(repetition.folder / "retries").splitlines()]
    return [f"retried without {', '.join(nodes)}"] if nodes else []


def stale(repetition: runs.Repetition, now: float) -> str | None:
    """That a run which is said to be running has recorded nothing for much longer than its steps take, if so."""
    began = _began(repetition)
    written, usual = 0.0, 0.0
    for arm in ARMS:
        file = repetition.run / arm / "metrics.jsonl"
        records = runs.recent(file)[-20:]
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


def _began(repetition: runs.Repetition) -> float:
    """When the newest start began: its first file is written then, and once; 0 before the first start."""
    if repetition.logs is None:
        return 0.0
    first = repetition.logs / "log"
    return (first if first.is_file() else repetition.logs).stat().st_mtime


def _last_line(file: Path) -> str:
    """The last line of a job's output, or that by which Slurm ended it, a few lines before; empty if it has none."""
    try:
        with file.open("rb") as output:
            output.seek(max(0, file.stat().st_size - _TAIL))
            lines = output.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()][-20:]
    return next((line for line in reversed(lines) if "error: *** " in line), lines[-1] if lines else "")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
