"""Profile some steps of a training with torch.profiler: one trace per rank, and where rank 0's time went.

Files, in ``folder``::

    trace/rank00000.json.gz      Chrome trace of a rank, with ranges of every operator call, of steps and optimizer
    breakdown.json               where the time of rank 0's GPU went (:mod:`telemetry.breakdown`)

Host and GPU are both recorded, since ranges are the host's; that slows the host, and small models show gaps that they
do not have otherwise. ui.perfetto.dev opens several traces together.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_flux.errors import one_line
from megatron_flux.log_once import logger
from megatron_flux.metrics import strict_json
from megatron_flux.ops import call_events
from megatron_flux.telemetry.breakdown import STEP, of_steps


class StepProfiler:
    """Profiles iterations ``first`` to ``last``; every rank has one."""

    def __init__(
        self, first: int, last: int, folder: Path, *, rank: int, device: torch.device, nvtx: bool = False
    ) -> None:
        """Wait until the step ahead of ``first``, which is 2 or more.

        With ``nvtx`` an nsys around this process captures (``--capture-range=cudaProfilerApi``); no file is written.
        """
        self.first, self.last, self.folder = first, last, folder
        self._rank, self._device, self._nvtx = rank, device, nvtx
        self._profile: profile | None = None
        self._failed = False
        self._running = ExitStack()

    def active(self, iteration: int) -> bool:
        """Return True if the profiler, or its start, slows this iteration."""
        return self.first - 1 <= iteration <= self.last

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Run one training step inside; the trace is written after the last one."""
        starts = iteration == self.first - 1
        if starts and not self._nvtx:
            self._begin()
        try:
            with call_events.named(f"{STEP} {iteration}"):
                yield
        except BaseException:
            self.close()  # the trace would lack steps
            raise
        if self._profile is not None and self.active(iteration):
            self._profile.step()
        if iteration == self.last:
            self._running.close()
        elif starts and self._nvtx:
            torch.cuda.profiler.start()
            self._running.callback(torch.cuda.profiler.stop)

    def close(self) -> None:
        """Stop; no trace if the run ended before the last step."""
        self._failed = True
        self._running.close()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        steps = schedule(wait=0, warmup=1, active=self.last - self.first + 1, repeat=1)
        self._running.enter_context(call_events.ranges(profiler=True))
        self._profile = self._running.enter_context(
            profile(activities=activities, schedule=steps, on_trace_ready=self._write)
        )

    def _write(self, profiler: profile) -> None:
        if self._failed:
            return
        path = self.folder / "trace" / f"rank{self._rank:05d}.json.gz"
        try:
            trace = saved(profiler, path)
            if self._rank == 0 and self._device.type == "cuda":
                found = of_steps(trace, (self.first, self.last), self._rank)
                strict_json.write_atomically(self.folder / "breakdown.json", strict_json.dumps(found, indent=2) + "\n")
        except (OSError, ValueError) as error:  # a full disk, where what torch has written may be cut
            room = f"is there room in {self.folder} and {tempfile.gettempdir()}?"
            logger.error("rank %d has no trace, and training goes on: %s; %s", self._rank, one_line(error), room)
            return
        if self._rank == 0:
            logger.info("trace of iterations %d to %d: %s", self.first, self.last, path.parent)


def saved(profiler: profile, path: Path) -> dict[str, Any]:
    """Write the steps of a recording as a compressed Chrome trace, whole or not at all, and return it."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace: dict[str, Any] = json.loads(raw.read_text())
    events = trace["traceEvents"]
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and str(e["name"]).startswith(STEP)]
    begin = min((start for start, _ in steps), default=-math.inf)
    end = max((end for _, end in steps), default=math.inf)
    trace["traceEvents"] = [e for e in events if e.get("ph") == "M" or begin <= e.get("ts", begin) <= end]
    trace["traceName"] = path.name  # it was the temporary file's full path
    path.parent.mkdir(parents=True, exist_ok=True)
    strict_json.write_atomically(path, gzip.compress(json.dumps(trace).encode(), compresslevel=6))
    return trace
