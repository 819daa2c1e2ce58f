"""One arm's step in other forms: as a CUDA graph, and under the profiler.

A step that is captured must allocate nothing outside torch's allocator, draw random numbers only from generators that a
graph can hold (Megatron's tracker is made that way when the run asks for graphs) and never wait for the GPU. An arm
that breaks one of these raises while it is captured, and the benchmark runs it without a graph and says so.
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

from megatron_flux.bench.layer_arms import Step
from megatron_flux.ops.cuda_graphs import captured_calls

WARMUP_STEPS = 3


def capture(step: Step) -> Step:
    """Capture ``step`` and return what replays it. All ranks must call it; the GPU is idle before and after.

    The graph keeps the memory of its activations, output and gradient for as long as the result lives.
    """
    from megatron.core.tensor_parallel.random import get_all_rng_states

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Workspaces of captured operators cannot be made during capture.
    with torch.cuda.stream(side), captured_calls():
        for _ in range(WARMUP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for state in get_all_rng_states().values():
        graph.register_generator_state(state)
    # thread_local: NCCL's watchdog thread may ask for events while this thread captures.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = step()
    torch.cuda.synchronize()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        graph.replay()
        return result

    return replay


def trace_step(step: Callable[[], object], path: Path | None) -> dict[str, Any] | None:
    """Run ``step`` twice and record the second one; every rank must call it, since steps communicate.

    Only the GPU's side and the CUDA calls are recorded: recording every torch operator slows the host so much that
    small layers would show gaps they do not have.

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
