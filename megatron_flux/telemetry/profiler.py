"""Some steps of a training under torch.profiler: one trace per rank that Perfetto opens, and where the time went.

    profiler = StepProfiler(5, 7, folder, ...)
    for iteration in ...:
        with profiler.step(iteration):     # also names the step for nsys
            ...
    profiler.close()

Files, in ``folder``::

    trace/rank00000.json.gz      Chrome trace of a rank, with ranges of every operator call, of steps and optimizer
    trace/merged.json.gz         all ranks in one, written by :func:`merge_run`
    breakdown.json               where rank 0's time went (:mod:`telemetry.breakdown`)

The step before the first one is used to start the profiler. Both the host's and the GPU's side are recorded, since
ranges are the host's; that slows the host, and small models show gaps that they do not have otherwise.

Each trace says at its end (``flux``) which rank and host it is of, which steps it holds, and a few times on that host's
clock at which all ranks left a barrier (``clock_ns``). In the merged trace every rank becomes processes of its own
(host, GPU), named and sorted by rank. Ranks of one host share its clock. Clocks of different hosts do not agree: each
host is shifted so that those barriers lie on those of rank 0's host. What remains is the time it takes to leave a
barrier, some tens of microseconds as a rule; the shifts are in the file.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_flux.errors import UserError, one_line
from megatron_flux.metrics import strict_json
from megatron_flux.ops import call_events
from megatron_flux.telemetry.breakdown import STEP, of_steps

logger = logging.getLogger("megatron_flux")

BARRIERS = 9
MERGED = "merged.json.gz"


class StepProfiler:
    """Profiles iterations ``first`` to ``last``; every rank has one."""

    def __init__(
        self,
        first: int,
        last: int,
        folder: Path,
        *,
        rank: int,
        device: torch.device,
        barrier: Callable[[], object],
        nvtx: bool = False,
    ) -> None:
        """Nothing happens before the step ahead of ``first``, which is 2 or more.

        ``folder`` gets the files; ``barrier`` waits for all ranks, on the host. With ``nvtx`` ranges are NVTX's, and
        instead of torch.profiler the capture of an nsys around this process runs (``nsys profile
        --capture-range=cudaProfilerApi``): no file is written.
        """
        self.first, self.last, self.folder = first, last, folder
        self._rank, self._device, self._barrier, self._nvtx = rank, device, barrier, nvtx
        self._profile: profile | None = None
        self._clock_ns: list[int] = []
        self._failed = False
        self._running = ExitStack()

    def active(self, iteration: int) -> bool:
        """Whether the profiler, or its start, slows this iteration."""
        return self.first - 1 <= iteration <= self.last

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """One training step; the trace is written behind the last one."""
        if iteration == self.first - 1 and not self._nvtx:
            self._begin()
        try:
            with call_events.named(f"{STEP} {iteration}"):
                yield
        except BaseException:
            self.close()  # what there is of a trace then is not what was asked for
            raise
        if not self.active(iteration):
            return
        if self._profile is not None:
            self._profile.step()
        if iteration == self.last:
            self._running.close()
        elif iteration == self.first - 1 and self._nvtx:
            torch.cuda.profiler.start()
            self._running.callback(torch.cuda.profiler.stop)

    def close(self) -> None:
        """Stop, without a trace, where the run ended before the last step that was asked for."""
        self._failed = True
        self._running.close()

    def _begin(self) -> None:
        for _ in range(BARRIERS):
            self._barrier()
            self._clock_ns.append(time.time_ns())
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        steps = schedule(wait=0, warmup=1, active=self.last - self.first + 1, repeat=1)
        self._running.enter_context(call_events.ranges(profiler=True))
        self._profile = self._running.enter_context(
            profile(activities=activities, schedule=steps, on_trace_ready=self._write)
        )

    def _write(self, profiler: profile) -> None:
        try:
            if not self._failed:
                self._write_files(profiler)
        except (OSError, ValueError) as error:  # a full disk, where what torch has written may be cut
            room = f"is there room in {self.folder} and {tempfile.gettempdir()}?"
            logger.error("rank %d has no trace, and training goes on: %s; %s", self._rank, one_line(error), room)

    def _write_files(self, profiler: profile) -> None:
        path = self.folder / "trace" / f"rank{self._rank:05d}.json.gz"
        trace = exported(profiler, path)
        trace["traceEvents"] = _within_steps(trace["traceEvents"])
        about = {"rank": self._rank, "host": socket.gethostname(), "steps": [self.first, self.last]}
        trace["flux"] = {**about, "clock_ns": self._clock_ns}
        write_trace(path, trace)
        if self._rank == 0:
            found = of_steps(trace, (self.first, self.last), self._rank)
            strict_json.write_atomically(self.folder / "breakdown.json", strict_json.dumps(found, indent=2) + "\n")
            logger.info("trace of iterations %d to %d: %s", self.first, self.last, path.parent)


def _within_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that belong to steps: recording, measuring and waiting for a turn go on between them."""
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and str(e["name"]).startswith(STEP)]
    begin = min((start for start, _ in steps), default=-math.inf)
    end = max((end for _, end in steps), default=math.inf)
    return [e for e in events if e.get("ph") == "M" or begin <= e.get("ts", begin) <= end]


def exported(profiler: profile, path: Path) -> dict[str, Any]:
    """What was recorded, as a Chrome trace by the name of ``path``."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text())
    trace["traceName"] = path.name  # it was the temporary file's full path
    return trace


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a Chrome trace, compressed, in a folder made when missing; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    strict_json.write_atomically(path, gzip.compress(json.dumps(trace).encode(), compresslevel=6))


def merge_run(run: Path) -> list[Path]:
    """Merge the traces of every arm in a run folder; returns the files written."""
    folders = sorted({file.parent for file in run.glob("*/trace/rank*.json.gz")})
    if not folders:
        raise UserError(
            f"{run} holds no traces; give a run folder that `megatron-flux train` or `compare` has written with "
            "--profile-steps"
        )
    for folder in folders:
        write_trace(folder / MERGED, merge([_read(file) for file in sorted(folder.glob("rank*.json.gz"))]))
    return [folder / MERGED for folder in folders]


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({one_line(error)}); remove it, or profile again") from error
    if not (isinstance(trace, dict) and "traceEvents" in trace and "flux" in trace):
        raise UserError(f"{path} is no trace of this program; remove it, or profile again")
    return trace


def merge(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One Chrome trace of several ranks' traces, in the time of the first one."""
    shifts = clock_shifts_ns([trace["flux"] for trace in traces])
    starts = [float(trace.get("baseTimeNanoseconds", 0)) + shifts[trace["flux"]["host"]] for trace in traces]
    about = {
        "ranks": [trace["flux"]["rank"] for trace in traces],
        "steps": traces[0]["flux"]["steps"],
        "clock_shifts_us": {host: shift / 1e3 for host, shift in shifts.items()},
    }
    moved = (_moved(trace, (start - starts[0]) / 1e3) for start, trace in zip(starts, traces, strict=True))
    events = [event for events in moved for event in events]
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
    names = {process: old for old, process in processes.items()}
    events = []
    for event in trace["traceEvents"]:
        process, about = processes.get(str(event.get("pid"))), event.get("ph") == "M"
        if process is None:
            continue
        if about and event["name"] == "process_labels":
            names[process] = str(event["args"]["labels"]) or names[process]
        elif not about or event["name"] not in ("process_name", "process_sort_index"):
            moved = {"ts": round(float(event["ts"]) + shift_us, 3)} if not about else {}
            flow = {"id": f"{rank}.{event['id']}"} if "id" in event else {}  # numbered by process
            events.append({**event, "pid": process, **moved, **flow})
    for process, label in names.items():
        name = {"ph": "M", "name": "process_name", "pid": process, "tid": 0}
        events.append({**name, "args": {"name": f"rank {rank} {label} ({host})"}})
        events.append({**name, "name": "process_sort_index", "args": {"sort_index": process}})
    return events
