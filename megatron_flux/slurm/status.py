"""The folder of a submitted job, as its script makes it: ``megatron-flux slurm status`` and ``collect``.

::

    runs/NAME-JOB/job.sbatch             the script
    runs/NAME-JOB/collect.sbatch         the one that collects, if `megatron-flux slurm submit` submitted it
    runs/NAME-JOB/submitted              where it was submitted, and to which partition, account and QOS
    runs/NAME-JOB/resumed                the ids of the jobs that went on in this folder, a line each
    runs/NAME-JOB/rep-0/run/             a run folder: records, summary, report
    runs/NAME-JOB/rep-0/checkpoints/
    runs/NAME-JOB/rep-0/retries          a line for each retry: steps of the failure, nodes left out from then on
    runs/NAME-JOB/rep-0/logs/0/          logs of the first start: one per step and node, pre-flight reports, failures;
                                         `error` is the job's last word, `log` names the file of its output
    runs/NAME-JOB/collected.json, .md    all repetitions side by side

Only the state is Slurm's to say. The rest is read here, at any time, also when Slurm has forgotten the job.

Repetitions are whole comparisons of their own, so the spread of their speed-ups is what another run of the job may
show; the interval within one repetition is only about its own blocks.
"""

from __future__ import annotations

import contextlib
import glob
import json
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_flux.errors import FluxError, UserError
from megatron_flux.metrics import strict_json
from megatron_flux.metrics.recorder import parse_record, read_records
from megatron_flux.metrics.report import write_report
from megatron_flux.metrics.strict_json import read_json_object
from megatron_flux.metrics.summary import VARIANTS, median_of, summarize, write_summary
from megatron_flux.metrics.table import UNKNOWN, relative, short
from megatron_flux.metrics.watch import RECENT, activity, ended
from megatron_flux.run.folder import CONFIG, ENDED
from megatron_flux.run.node import PREFIX
from megatron_flux.slurm import queue

RESUMED, SUBMITTED, SCRIPT, COLLECTOR = "resumed", "submitted", "job.sbatch", "collect.sbatch"
_TAIL = 1 << 18  # bytes of a growing file that are read from its end
_FAILURE = re.compile(r"(\d+) (\d+(?:\.\d+)?) (.+)")  # megatron_flux.run.node
_FOLDER = re.compile(r"(?P<name>.+)-(?P<job>\d+)")


@dataclass(frozen=True)
class Repetition:
    """One run of a job."""

    folder: Path
    run: Path  # the run folder
    index: str
    iterations: dict[str, int]  # the last recorded step of each variant that has begun
    steps: int | None  # what it trains to; None before it has begun
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
        run, index = folder / "run", folder.name.removeprefix("rep-")
        if not index.isdigit():
            continue
        last = {
            variant: _recent(run / variant / "metrics.jsonl")[-1:] for variant in VARIANTS if (run / variant).is_dir()
        }
        iterations = {variant: records[0]["iteration"] if records else 0 for variant, records in last.items()}
        steps = read_json_object(run / CONFIG)["config"]["steps"] if (run / CONFIG).is_file() else None
        state = read_json_object(run / ENDED)["state"] if (run / ENDED).is_file() else "not ended"
        starts = {int(path.name): path for path in (folder / "logs").glob("*") if path.name.isdigit()}
        logs = starts[max(starts)] if starts else None
        found.append(Repetition(folder, run, index, iterations, steps, state, len(starts), logs))
    return sorted(found, key=lambda one: int(one.index))


def describe(root: Path, now: float) -> list[str]:
    """Describe the job whose folder is ``root`` at the Unix time ``now``, in lines."""
    name, first = split(root)
    number = jobs(root)[-1]
    try:
        known = queue.job_states(number)
    except FluxError as error:
        if isinstance(error, UserError):
            raise
        known = queue.JobStates(states={}, source=f"state unknown: {error}")
    states = ", ".join(dict.fromkeys(known.states.values())) or known.source
    if known.states and known.source != "controller":
        states += f" (by {known.source})"
    resumed = f", resumed as {number}" if number != first else ""
    lines, begun = [f"{name} job {first}{resumed}: {states}"], repetitions(root)
    if known.states and not known.active and not begun:
        submitted = Path(text(root / SUBMITTED).partition("\n")[0])
        lines += [f"    last line of {log}: {_last_line(log)}" for log in submitted.glob(f"{name}-{number}*.log")]
    for repetition in begun:
        task = known.states.get(repetition.index, "")
        steps = ", ".join(f"{variant} {n}/{repetition.steps}" for variant, n in repetition.iterations.items())
        parts = [repetition.state if repetition.state == "not ended" else ended(repetition.state)]
        parts += [f"step {steps}" if steps else "nothing recorded", f"{repetition.starts} start(s)"]
        lines.append(f"  rep-{repetition.index}: {', '.join([*parts, task] if task else parts)}")
        if without := [line.split()[-1] for line in text(repetition.folder / "retries").splitlines()]:
            lines.append(f"    retried without {', '.join(without)}")
        state, more = (task or known.states.get("", "")).split(" ")[0], []
        if state == "RUNNING":
            more = [line for line in [doing(repetition, now)] if line]
        elif repetition.state == "not ended" and state != "PENDING":
            more = cause(repetition)
        lines += [f"    {line}" for line in more]
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
    began, written, usual = _began(repetition), None, 0.0
    if not began or repetition.state == "finished":
        return None
    for variant in VARIANTS:
        file = repetition.run / variant / "metrics.jsonl"
        records = _recent(file)[-RECENT:]
        # A run that resumes writes its earlier records anew before it adds to them.
        if records and (records[-1].get("timestamp") or file.stat().st_mtime) >= began:
            written = max(written or 0.0, file.stat().st_mtime)
            usual = max(usual, median_of(records, "iteration-time") or 0.0)
    words, stalled = activity(now, began, written, usual)
    return f"{words}; see {repetition.logs}" if stalled else words


def logs(root: Path, *, rank: int | None = None, node: str | None = None) -> list[str]:
    """Return a rank's or node's log lines of the newest start of the job whose folder is ``root``.

    Raises UserError: there are none.
    """
    split(root)
    starts = [found.logs for found in repetitions(root) if found.logs is not None]
    # A repetition begins when the one before has ended.
    newest = max(starts, key=lambda start: start.stat().st_mtime, default=root)
    files = sorted(
        newest.glob(f"*-[0-9]*-{glob.escape(node) if node else '*'}.log"), key=lambda file: file.stat().st_mtime
    )
    written = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    begin = "" if rank is None else PREFIX.format(rank)
    lines = [line.removeprefix(begin) for line in written if line.startswith(begin)]
    if not lines:
        who = " and ".join([f"rank {rank}"] * (rank is not None) + [f"node {node}"] * (node is not None))
        names = sorted({file.stem.split("-", 2)[2] for file in newest.glob("train-[0-9]*-*.log")})
        instead = f"`megatron-flux slurm status {root}` says what has begun"
        if written:  # most ranks write nothing unless something is wrong
            ranks = sorted({int(match[1]) for line in written if (match := re.match(r"\[rank (\d+)\] ", line))})
            instead = f"ranks that wrote there: {', '.join(map(str, ranks)) or 'none'}"
        elif node is not None and names and node not in names:
            instead = f"use one of the nodes {', '.join(names)}"
        raise UserError(f"no line of {who} in {newest}/*.log; {instead}")
    return lines


def _began(repetition: Repetition) -> float:
    """Return when the newest start began: its first file is written then, and once. 0 before the first start."""
    if repetition.logs is None:
        return 0.0
    first = repetition.logs / "log"
    return (first if first.is_file() else repetition.logs).stat().st_mtime


def _recent(file: Path) -> list[dict[str, Any]]:
    """Read the last whole records of a file that may be being written; other lines are skipped."""
    found = []
    for line in _tail(file)[:-1]:
        with contextlib.suppress(ValueError):
            found.append(parse_record(line))
    return found


def _last_line(file: Path) -> str:
    """Return the last line of a job's output, or Slurm's error a few lines before; empty if it has none."""
    lines = [line for raw in _tail(file) if (line := raw.decode(errors="replace").strip())][-20:]
    return next((line for line in reversed(lines) if "error: *** " in line), lines[-1] if lines else "")


def _tail(file: Path) -> list[bytes]:
    """Read the lines at the end of a file, from the first whole one on; empty if it cannot be read."""
    try:
        with file.open("rb") as content:
            begin = max(0, file.stat().st_size - _TAIL)
            content.seek(begin)
            return content.read().split(b"\n")[1 if begin else 0 :]
    except OSError:
        return []


def text(file: Path) -> str:
    """Read a small file, stripped; empty where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def collect(root: Path) -> dict[str, Any]:
    """Write each repetition's report, and ``collected.json`` and ``collected.md`` of all; return the JSON's content.

    That is ``name``, ``job``, ``repetitions`` (index, state, and of each variant the median step time; speed-up, its
    interval, loss difference and report of a comparison), and over the finished comparisons ``speedup_median``,
    ``speedup_min``, ``speedup_max``, null where there is none. A :class:`UserError` where nothing is recorded.
    """
    name, job = split(root)
    found = [_collected(repetition) for repetition in repetitions(root) if any(repetition.iterations.values())]
    if not found:
        raise UserError(f"{root} has no records yet; see the logs in {root}/rep-*/logs")
    speedups = [one["speedup"] for one in found if one["speedup"] is not None and one["state"] == "finished"]
    collected = {
        **{"name": name, "job": job, "repetitions": found},
        "speedup_median": statistics.median(speedups) if speedups else None,
        "speedup_min": min(speedups, default=None),
        "speedup_max": max(speedups, default=None),
    }
    text = strict_json.dumps(collected, indent=2)
    try:
        strict_json.write_atomically(root / "collected.json", text + "\n")
        strict_json.write_atomically(root / "collected.md", table(collected))
    except OSError as error:
        raise UserError(f"{root} cannot be written: {error.strerror}") from None
    return json.loads(text)


def _collected(repetition: Repetition) -> dict[str, Any]:
    run, finished = repetition.run, repetition.state == "finished"
    records = {
        variant: read_records(file) if (file := run / variant / "metrics.jsonl").is_file() else []
        for variant in VARIANTS
    }
    summary = summarize(records["baseline"], records["flux"], read_json_object(run / CONFIG))
    if finished and not (run / "summary.json").is_file():
        write_summary(run / "summary.json", summary)
    return {
        **{name: getattr(repetition, name) for name in ("index", "state", "starts", "iterations")},
        "step_time_ms": {variant: summary["arms"][variant]["step_time_ms"]["median"] for variant in VARIANTS},
        "final_loss": {variant: summary["arms"][variant]["final_loss"] for variant in VARIANTS},
        **{name: summary[name] for name in ("speedup", "speedup_ci95")},
        "max_relative_loss_difference": summary["max_relative_loss_difference"] if all(records.values()) else None,
        **{name: summary[name] for name in ("flux_active_layers", "flux_fallbacks")},
        **{name: read_json_object(run / CONFIG).get(name) for name in ("link", "wire", "grad_wire")},
        "report": str(write_report([run], run).relative_to(repetition.folder.parent)),
    }


def table(collected: dict[str, Any]) -> str:
    """Format ``collected.md``: one line per repetition."""
    header = "run | state | starts | baseline, ms | flux, ms | speed-up | 95 % interval | loss difference | report"
    lines = [f"# {collected['name']}, job {collected['job']}", "", f"| {header} |"]
    lines.append(f"| {' | '.join('---' for _ in header.split(' | '))} |")
    for one in collected["repetitions"]:
        times = [UNKNOWN if ms is None else short(ms) for ms in (one["step_time_ms"][variant] for variant in VARIANTS)]
        speedup = UNKNOWN if one["speedup"] is None else f"{one['speedup']:.3f}"
        interval = UNKNOWN if one["speedup_ci95"] is None else "…".join(f"{end:.3f}" for end in one["speedup_ci95"])
        cells = [one["index"], one["state"], str(one["starts"]), *times, speedup, interval]
        cells += [relative(one["max_relative_loss_difference"]), f"[{one['report']}]({one['report']})"]
        lines.append(f"| {' | '.join(cells)} |")
    if collected["speedup_median"] is not None:
        line = "median {speedup_median:.3f} ({speedup_min:.3f}…{speedup_max:.3f})."
        lines += ["", f"Speed-up of the finished repetitions: {line.format_map(collected)}"]
    return "\n".join(lines) + "\n"
