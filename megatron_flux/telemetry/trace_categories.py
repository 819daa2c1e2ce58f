"""What a trace of torch.profiler shows the GPU doing: the category of each event, and each category's busy time.

Definitions, all of one rank:

* busy time of a category: the time during which at least one of its kernels ran (the length of the intervals' union).
  A kernel that shares the GPU with another runs slower, and its busy time says so.
* communication: kernels of NCCL, userbuffers and symmetric memory, copies between GPUs, and copies within the device
  that run beside the stream of the GEMMs (some drivers report a copy to memory mapped from a peer as such).
* exposed: the part of communication's busy time during which no kernel of any other category ran; hidden: the rest.
* idle: the part of the span, from the first kernel's begin to the last one's end, in which nothing ran at all.

Limit: communication inside a fused kernel cannot be separated from its GEMM; it shows as a ``fused`` time longer than
the GEMM would take.

This is the one place that knows names of kernels and operators. Rules are tried in order, so the first decides a name
that fits two: flux's kernels are GEMMs too, cuDNN's attention contains the word of a GEMM instruction, and a compiled
norm is also a compiled elementwise kernel.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

CATEGORIES = ("gemm", "fused", "communication", "attention", "norm", "other")

_KERNELS = {
    # megatron_flux.kernels: GEMM and communication in one kernel. Inductor's "triton_poi_fused_..." are no such thing.
    "fused": re.compile(r"(?<![a-z])(ag_gemm|gemm_rs)_", re.IGNORECASE),
    # NCCL; TransformerEngine's userbuffers; flux's wait for a gather; torch's symmetric memory (async-TP's barriers).
    "communication": re.compile(
        r"nccl|userbuffers|gather_wait_kernel|symmetric_memory|barrier_kernel|(put|wait)_signal_kernel"
        r"|(one|two)_shot|multimem",
        re.IGNORECASE,
    ),
    "norm": re.compile(r"layer_?norm|rms_?norm|normalization::|\bln_(fwd|bwd)|gammabeta", re.IGNORECASE),
    "attention": re.compile(r"sdpa|flash|fmha|fused_attn|cudnn|softmax", re.IGNORECASE),
    "gemm": re.compile(r"nvjet|gemm|gemv|cutlass|cublas|splitk", re.IGNORECASE),
}

_OPERATORS = {
    "communication": re.compile(r"^(c10d|gloo|nccl|mpi)[:_]"),
    "norm": re.compile(r"^aten::.*(layer_norm|rms_norm)"),
    # Megatron's unfused attention multiplies in batches, which its linears do not.
    "attention": re.compile(r"^aten::(_?softmax|_softmax_backward_data|bmm|baddbmm_?|.*scaled_dot_product.*)$"),
    "gemm": re.compile(r"^aten::(mm|addmm|addmm_|_addmm_activation|addmv|mv)$"),
    "other": re.compile(r"^aten::"),
}

Interval = tuple[float, float]


@cache
def category(kernel: str) -> str:
    """The category of a kernel's name, one of :data:`CATEGORIES`; what no rule knows is ``other``."""
    return next((name for name, rule in _KERNELS.items() if rule.search(kernel)), "other")


@cache
def cpu_category(operator: str) -> str | None:
    """The category of an operator's name in a trace of the CPU; None for what only contains operators.

    Autograd's functions and nodes contain waits, so their time says nothing about what was done.
    """
    return next((name for name, rule in _OPERATORS.items() if rule.search(operator)), None)


def union(intervals: list[Interval]) -> list[Interval]:
    """The same points in time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: list[Interval]) -> float:
    """The length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What two unions have in common."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


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
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
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
        name = "other"
        if e.kind == "kernel":
            name = category(e.name)
        elif e.kind == "gpu_memcpy":
            beside = "DtoD" in e.name and compute_stream is not None and e.stream != compute_stream
            name = "communication" if "PtoP" in e.name or beside else "other"
        found[name].append((e.start, e.end))
    return {name: union(intervals) for name, intervals in found.items()}


def breakdown(trace: dict[str, Any], layers: int) -> dict[str, float]:
    """The times of one step in milliseconds per layer, as defined in the module.

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
    hidden = length(common(communication, compute))
    micros = {f"{name}_ms": length(intervals) for name, intervals in found.items()}
    micros |= {
        "communication_exposed_ms": length(communication) - hidden,
        "communication_hidden_ms": hidden,
        "idle_ms": span - length(everything),
        "span_ms": span,
    }
    shown = {name: round(value / 1e3 / layers, 4) for name, value in micros.items()}
    return {**shown, "launches": round(len(events) / layers, 2)}
