"""The traces of all ranks as one, aligned in time.

Every rank becomes processes of its own in the merged trace (host, GPU), named and sorted by rank. Ranks of one host
share its clock. Clocks of different hosts do not agree: each host is shifted so that the barriers which all ranks left
together before the profile (``clock_ns``, by :mod:`telemetry.profiler`) lie on those of rank 0's host. What
remains is the time it takes to leave a barrier, some tens of microseconds as a rule; the shifts are in the file.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_flux.errors import UserError
from megatron_flux.telemetry.profiler import write_trace

MERGED = "merged.json.gz"


def merge_run(run: Path) -> list[Path]:
    """Merge the traces of every arm in a run folder; returns the files written.

    Raises:
        UserError: there are none, or one cannot be read.
    """
    folders = sorted({file.parent for file in run.glob("*/trace/rank*.json.gz")})
    if not folders:
        raise UserError(
            f"{run} holds no traces; give a run folder that `megatron-flux train` or `compare` has written with "
            "--profile-steps"
        )
    written = []
    for folder in folders:
        traces = [read_trace(file) for file in sorted(folder.glob("rank*.json.gz"))]
        write_trace(folder / MERGED, merge(traces))
        written.append(folder / MERGED)
    return written


def read_trace(path: Path) -> dict[str, Any]:
    """A rank's trace.

    Raises:
        UserError: it cannot be read, or is none of this program's.
    """
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read ({cause}); remove it, or profile again") from error
    if not (isinstance(trace, dict) and "traceEvents" in trace and "flux" in trace):
        raise UserError(f"{path} is no trace of this program; remove it, or profile again")
    return trace


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One Chrome trace of several ranks' traces; times count from the first event of any."""
    shifts = clock_shifts_ns([trace["flux"] for trace in traces])
    starts = [float(trace.get("baseTimeNanoseconds", 0)) + shifts[trace["flux"]["host"]] for trace in traces]
    first = min(
        start + 1e3 * float(event["ts"])
        for start, trace in zip(starts, traces, strict=True)
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    )
    events: list[dict[str, Any]] = []
    for start, trace in zip(starts, traces, strict=True):
        events += _moved(trace, (start - first) / 1e3)
    about = {
        "ranks": [trace["flux"]["rank"] for trace in traces],
        "steps": traces[0]["flux"]["steps"],
        "clock_shifts_us": {host: shift / 1e3 for host, shift in shifts.items()},
    }
    return {"traceName": MERGED, "displayTimeUnit": "ms", "flux": about, "traceEvents": events}


def clock_shifts_ns(about: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By host: what to add to its clock so that it agrees with the first rank's host; 0 for that one.

    Median over barriers of the difference between the hosts' median ranks: a rank that was late at one barrier, or a
    barrier that was slow, does not move it.
    """
    by_host: dict[str, list[list[int]]] = {}
    for one in about:
        by_host.setdefault(one["host"], []).append(one["clock_ns"])
    middles = {host: [statistics.median(times) for times in zip(*rows, strict=True)] for host, rows in by_host.items()}
    base = middles[about[0]["host"]]
    return {
        host: float(statistics.median(b - t for b, t in zip(base, times, strict=True))) if times and base else 0.0
        for host, times in middles.items()
    }


def _moved(trace: dict[str, Any], shift_us: float) -> list[dict[str, Any]]:
    """The events of a rank, later by ``shift_us``, in processes and with flows of their own."""
    rank, host = trace["flux"]["rank"], trace["flux"]["host"]
    # Every trace names all GPUs of its machine; only those that did something are worth a line.
    busy = dict.fromkeys(str(event.get("pid")) for event in trace["traceEvents"] if event.get("ph") == "X")
    processes = {old: 1 + rank * 100 + number for number, old in enumerate(busy)}  # far fewer than 100 a rank
    names: dict[int, str] = {}
    events = []
    for event in trace["traceEvents"]:
        process = processes.get(str(event.get("pid")))
        if process is None:
            continue
        if event.get("ph") == "M" and event["name"] in ("process_name", "process_sort_index", "process_labels"):
            if event["name"] == "process_labels":
                names[process] = str(event["args"]["labels"])
            continue
        moved = {**event, "pid": process}
        if event.get("ph") != "M":
            moved["ts"] = round(float(event["ts"]) + shift_us, 3)
        if "id" in event:  # flows are numbered by process
            moved["id"] = f"{rank}.{event['id']}"
        events.append(moved)
    for old, process in processes.items():
        label = names.get(process) or old
        name = {"ph": "M", "name": "process_name", "pid": process, "tid": 0}
        events.append({**name, "args": {"name": f"rank {rank} {label} ({host})"}})
        events.append({**name, "name": "process_sort_index", "args": {"sort_index": process}})
    return events
