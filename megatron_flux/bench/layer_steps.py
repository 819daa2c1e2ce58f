"""Ways to run the steps of ``bench layer``: in interleaved rounds, as a CUDA graph, and under the profiler.

A step that is captured must allocate nothing outside torch's allocator, draw random numbers only from generators that a
graph can hold (Megatron's tracker is made that way when the run asks for graphs) and never wait for the GPU. An arm
that breaks one of these raises while it is captured, and the benchmark runs it without a graph and says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from megatron_flux import nvml
from megatron_flux.bench.layer_arms import Step
from megatron_flux.comm.agreement import of_all_ranks
from megatron_flux.ops import timing
from megatron_flux.ops.cuda_graphs import captured_calls
from megatron_flux.telemetry.profiler import exported, write_trace

WARMUP_STEPS = 3

Runnable = tuple[Callable[[], object], Callable[[], AbstractContextManager[None]]]
"""A step, and the context it runs in (patched or not)."""
Samples = dict[str, list[Any]]
"""Of one arm, one entry per round: ``step_ms`` and ``host_ms`` (to enqueue a step on an idle GPU) of the slowest rank,
``sm_clock_mhz`` of the slowest GPU in the middle of the burst (None where none told), ``throttle_reasons``: names of
what held any GPU's clock down at that moment."""


def interleave(
    arms: Mapping[str, Runnable],
    group: dist.ProcessGroup,
    ranks: dist.ProcessGroup,
    device: torch.device,
    *,
    rounds: int,
    burst: int,
    deadline: float | None = None,
    gpu: nvml.Gpu | None = None,
) -> dict[str, Samples]:
    """Time every arm ``rounds`` times (:func:`megatron_flux.ops.timing.rounds`); the samples are those of all ranks.

    Python's garbage collector runs between arms, not inside them. From the second round on each rank looks at its GPU's
    clock in the middle of a burst (on nothing without ``gpu``): arms that move data while they multiply may be held at
    lower clocks. No round but the first begins after the ``time.monotonic()`` ``deadline`` of the first rank.
    """
    seen: dict[str, list[nvml.Reading | None]] = {name: [] for name in arms}
    half: dict[str, float] = {}
    """Of an arm's last burst, in seconds."""
    running, began, glance = "", 0.0, None

    def barrier() -> None:
        nonlocal began, glance
        dist.barrier(group=ranks)
        glance = nvml.Glance(gpu, half[running]) if gpu is not None and running in half else None
        began = time.perf_counter()

    @contextmanager
    def around(name: str) -> Iterator[None]:
        nonlocal running
        running = name
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with arms[name][1]():
                yield
                half[name] = (time.perf_counter() - began) / 2
                seen[name].append(glance.result() if glance else None)
        finally:
            if collecting:
                gc.enable()

    found = timing.rounds(
        {name: step for name, (step, _) in arms.items()},
        group,
        device,
        rounds,
        burst,
        around=around,
        barrier=barrier,
        go_on=lambda: not of_all_ranks(deadline is not None and time.monotonic() > deadline, ranks)[0],
    )
    by_rank, samples = of_all_ranks(seen, ranks), {}
    for name, one in found.items():
        clocks, reasons = [], []
        for readings in zip(*(readings[name] for readings in by_rank), strict=True):
            known = [reading for reading in readings if reading is not None]
            clocks.append(min((r.sm_clock_mhz for r in known if r.sm_clock_mhz is not None), default=None))
            reasons.append(sorted({reason for r in known for reason in nvml.throttle_reasons(r.throttle)}))
        samples[name] = {
            "step_ms": one.ms,
            "host_ms": one.first_host_ms,
            "sm_clock_mhz": clocks,
            "throttle_reasons": reasons,
        }
    return samples


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

    def replay() -> tuple[torch.Tensor, ...]:
        graph.replay()
        return result

    return replay


def trace_step(step: Callable[[], object], path: Path | None) -> dict[str, Any] | None:
    """Run ``step`` twice and record the second one; every rank must call it, since steps communicate.

    Only the GPU's side and the CUDA calls are recorded: recording every torch operator slows the host so much that
    small layers would show gaps they do not have. Returns the trace, which is also written to ``path`` (``.json.gz``);
    None without one, on ranks that only take part.
    """
    if path is None:
        for _ in range(2):
            step()
            torch.cuda.synchronize()
        return None
    traces: list[dict[str, Any]] = []
    with profile(
        activities=[ProfilerActivity.CUDA],
        # The first step under a profiler pays for its start.
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda done: traces.append(exported(done, path)),
    ) as profiler:
        for _ in range(2):
            step()
            torch.cuda.synchronize()
            profiler.step()
    write_trace(path, traces[0])
    return traces[0]
