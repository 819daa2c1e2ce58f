"""Where one step's GPU time went, from the intervals of a Chrome trace that torch.profiler wrote.

Definitions, all of one rank and one step:

* busy time of a category: the time during which at least one of its kernels ran (the length of the intervals' union).
  A kernel that shares the GPU with another runs slower, and its busy time says so.
* communication: kernels of NCCL, userbuffers and symmetric memory, copies between GPUs, and copies within the device
  that run beside the stream of the GEMMs (a copy to memory mapped from a peer is reported as such by some drivers).
* exposed: the part of communication's busy time during which no kernel of any other category ran; hidden: the rest.
* idle: the part of the span, from the first kernel's begin to the last one's end, in which nothing ran at all.

Limit: communication inside a fused kernel cannot be told from its GEMM here; it shows as a ``fused`` time longer than
the GEMM alone would take.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from megatron_flux.telemetry.intervals import Interval, length, overlap, union
from megatron_flux.telemetry.kernel_names import CATEGORIES, category

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """One thing the GPU did; microseconds."""

    name: str
    kind: str
    """The trace's own category: ``kernel``, ``gpu_memcpy`` or ``gpu_memset``."""
    start: float
    end: float
    stream: int


def gpu_events(trace: dict[str, Any]) -> list[Event]:
    """The GPU's part of a Chrome trace, in order of start."""
    found = [
        Event(e["name"], e["cat"], float(e["ts"]), float(e["ts"]) + float(e["dur"]), e.get("args", {}).get("stream", 0))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in _GPU
    ]
    return sorted(found, key=lambda e: (e.start, e.end))


def by_category(events: list[Event]) -> dict[str, list[Interval]]:
    """Disjoint intervals of every category."""
    on_stream: dict[int, float] = defaultdict(float)
    for e in events:
        if e.kind == "kernel" and category(e.name) in ("gemm", "fused"):
            on_stream[e.stream] += e.end - e.start
    compute_stream = max(on_stream, key=lambda s: on_stream[s]) if on_stream else None
    found: dict[str, list[Interval]] = {name: [] for name in CATEGORIES}
    for e in events:
        found[_category(e, compute_stream)].append((e.start, e.end))
    return {name: union(intervals) for name, intervals in found.items()}


def _category(event: Event, compute_stream: int | None) -> str:
    if event.kind == "kernel":
        return category(event.name)
    if event.kind == "gpu_memcpy":
        beside = "DtoD" in event.name and compute_stream is not None and event.stream != compute_stream
        return "communication" if "PtoP" in event.name or beside else "other"
    return "other"


def breakdown(trace: dict[str, Any], layers: int) -> dict[str, float]:
    """The step's times in milliseconds per layer, as defined in the module.

    Args:
        trace: a Chrome trace of one step of ``layers`` layers.
        layers: what the step is divided by.

    Returns:
        ``<category>_ms`` of every category, ``communication_exposed_ms``, ``communication_hidden_ms``, ``idle_ms``,
        ``span_ms``, and ``launches``: kernels, copies and fills per layer. Empty if the GPU did nothing.
    """
    events = gpu_events(trace)
    if not events:
        return {}
    found = by_category(events)
    compute = union([i for name, intervals in found.items() if name != "communication" for i in intervals])
    communication = found["communication"]
    everything = union(compute + communication)
    span = everything[-1][1] - everything[0][0]
    hidden = overlap(communication, compute)
    micros = {f"{name}_ms": length(intervals) for name, intervals in found.items()}
    micros |= {
        "communication_exposed_ms": length(communication) - hidden,
        "communication_hidden_ms": hidden,
        "idle_ms": span - length(everything),
        "span_ms": span,
    }
    shown = {name: round(value / 1e3 / layers, 4) for name, value in micros.items()}
    return {**shown, "launches": round(len(events) / layers, 2)}
