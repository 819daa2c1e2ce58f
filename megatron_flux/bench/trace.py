"""One step of an arm under torch.profiler, as a Chrome trace that Perfetto opens.

Only the GPU's side and the CUDA calls are recorded: recording every torch operator slows the host so much that
small layers would show gaps they do not have.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule


def trace_step(step: Callable[[], object], path: Path | None) -> dict[str, Any] | None:
    """Run ``step`` twice and record the second one; every rank must call it, since steps communicate.

    Args:
        step: enqueues one step on the GPU.
        path: where the trace goes (``.json.gz``); None on ranks that only take part.

    Returns:
        The trace, or None without ``path``.
    """
    if path is None:
        for _ in range(2):
            step()
            torch.cuda.synchronize()
        return None
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            # The first step under a profiler pays for its start.
            schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
            on_trace_ready=lambda p: p.export_chrome_trace(str(raw)),
        ) as profiler:
            for _ in range(2):
                step()
                torch.cuda.synchronize()
                profiler.step()
        trace = json.loads(raw.read_text())
    trace["traceName"] = path.name  # it was the temporary file's full path
    with gzip.open(path, "wt", compresslevel=6) as file:
        json.dump(trace, file)
    return trace
