"""Some steps of a training under torch.profiler: one trace per rank that Perfetto opens, and where the time went.

    profiler = StepProfiler(5, 7, folder, ...)
    for iteration in ...:
        with profiler.step(iteration):     # also names the step for nsys
            ...
    profiler.close()

Files, in ``folder``::

    trace/rank00000.json.gz      Chrome trace of a rank, with ranges of every operator call, of steps and optimizer
    breakdown.json               where rank 0's time went (:mod:`telemetry.trace_parts`)

The step before the first one is used to start the profiler. Both the host's and the GPU's side are recorded, since
ranges are the host's; that slows the host, and small models show gaps that they do not have otherwise.

Each trace says at its end (``flux``) which rank and host it is of, which steps it holds, and a few times on that host's
clock at which all ranks left a barrier: :mod:`telemetry.trace_merge` aligns hosts by them.
"""

from __future__ import annotations

import gzip
import json
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_flux.metrics import strict_json
from megatron_flux.ops import call_events
from megatron_flux.telemetry.trace_parts import STEP, parts

logger = logging.getLogger("megatron_flux")

BARRIERS = 9


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
        """Nothing happens before the step ahead of ``first``.

        Args:
            first: first iteration in the trace, from 2.
            last: last one.
            folder: gets the files; made when missing.
            rank: of this process.
            device: where it computes.
            barrier: waits for all ranks, on the host.
            nvtx: ranges are NVTX's, and instead of torch.profiler the capture of an nsys around this process runs
                (``nsys profile --capture-range=cudaProfilerApi``): no file is written.
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
        if iteration == self.first - 1:
            self._begin()
        try:
            with call_events.named(f"{STEP} {iteration}"):
                yield
        except BaseException:
            self._failed = True  # what there is of a trace then is not what was asked for
            self._running.close()
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
        if self._nvtx:
            return
        for _ in range(BARRIERS):
            self._barrier()
            self._clock_ns.append(time.time_ns())
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._running.enter_context(call_events.ranges(profiler=True))
        self._profile = self._running.enter_context(
            profile(
                activities=activities,
                schedule=schedule(wait=0, warmup=1, active=self.last - self.first + 1, repeat=1),
                on_trace_ready=self._write,
            )
        )

    def _write(self, profiler: profile) -> None:
        if self._failed:
            return
        path = trace_file(self.folder, self._rank)
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(raw))
            trace = json.loads(raw.read_text())
        trace["traceEvents"] = _of_steps(trace["traceEvents"])
        trace["traceName"] = path.name  # it was the temporary file's full path
        trace["flux"] = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "steps": [self.first, self.last],
            "clock_ns": self._clock_ns,
        }
        write_trace(path, trace)
        if self._rank == 0:
            found = parts(trace, (self.first, self.last), self._rank)
            strict_json.write_atomically(self.folder / "breakdown.json", strict_json.dumps(found, indent=2) + "\n")
            logger.info("trace of iterations %d to %d: %s", self.first, self.last, path.parent)


def _of_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that belong to steps: recording, measuring and waiting for a turn go on between them."""
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and str(e["name"]).startswith(STEP)]
    if not steps:
        return events
    begin, end = min(start for start, _ in steps), max(end for _, end in steps)
    return [e for e in events if e.get("ph") == "M" or begin <= e.get("ts", begin) <= end]


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank's trace lies in an arm's folder."""
    return folder / "trace" / f"rank{rank:05d}.json.gz"


def write_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write a Chrome trace, compressed, in a folder made when missing; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    strict_json.write_atomically(path, gzip.compress(json.dumps(trace).encode(), compresslevel=6))
