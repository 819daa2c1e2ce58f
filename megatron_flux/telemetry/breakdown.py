"""Where the time in a trace of torch.profiler went: by category of what ran, or as disjoint parts of steps.

Definitions, all of one rank:

* busy time of a category: the time during which at least one of its kernels ran (the length of the intervals' union).
  A kernel that shares the GPU with another runs slower, and its busy time says so.
* communication: kernels of NCCL, userbuffers and symmetric memory, copies between GPUs, and copies within the device
  that run beside the stream of the GEMMs (some drivers report a copy to memory mapped from a peer as such).
* exposed: the part of communication's busy time during which no kernel of any other category ran; hidden: the rest.
* idle: the part of the span, from the first kernel's begin to the last one's end, in which nothing ran at all.

The parts of a step (:func:`of_steps`) add up to it. Every moment of a step (from its range ``flux::step`` on the host,
which begins and ends with an idle device) counts once: for ``optimizer`` where something other than communication ran
inside the range ``flux::optimizer``, else for the first of ``gemm``, ``fused``, ``attention``, ``norm``, ``other`` that
was busy then, else for ``communication_exposed`` where communication ran by itself, else for ``idle``.

With a GPU in the trace its own timeline counts. Without one it is the timeline of torch's operators on the host: then
``idle`` is Python, and waits for peers that no operator of torch covers. A profiler slows the host, so that ``idle`` is
an upper bound.

Limit: communication inside a fused kernel cannot be separated from its GEMM; it shows as a ``fused`` time longer than
the GEMM would take.

This is the one place that knows names of kernels and operators. Rules are tried in order, so the first decides a name
that fits two: flux's kernels are GEMMs too, cuDNN's attention contains the word of a GEMM instruction, and a compiled
norm is also a compiled elementwise kernel.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

from megatron_flux.metrics.schema import BREAKDOWN_PARTS, BREAKDOWN_VERSION

CATEGORIES = ("gemm", "fused", "communication", "attention", "norm", "other")
STEP, OPTIMIZER = "flux::step", "flux::optimizer"
"""Names of ranges (a step's is followed by its number)."""

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
_Work = tuple[str, float, float]
"""Category, start and end of something that ran; microseconds."""


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


def of_layers(trace: dict[str, Any], layers: int) -> dict[str, float]:
    """The times of a trace of one step of ``layers`` layers, in milliseconds per layer; empty if the GPU did nothing.

    ``<category>_ms`` of every category, ``communication_exposed_ms``, ``communication_hidden_ms``, ``idle_ms``,
    ``span_ms``, and ``launches``: kernels, copies and fills per layer.
    """
    events = _on_gpu(trace)
    if not events:
        return {}
    found = _by_category(events)
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


def of_steps(trace: dict[str, Any], steps: Sequence[int], rank: int) -> dict[str, Any]:
    """``breakdown.json`` of the trace of ``rank``; its fields are described in :mod:`megatron_flux.metrics.schema`.

    ``steps``: first and last iteration in the trace, which has the ranges above; ValueError where it has no step.
    """
    windows = union(_ranges(trace, STEP, "user_annotation"))
    if not windows:
        raise ValueError("the trace holds no range of a step")
    on_gpu = _on_gpu(trace)
    events = on_gpu or _on_host(trace)
    optimizer = union(_ranges(trace, OPTIMIZER, "gpu_user_annotation" if on_gpu else "user_annotation"))
    found = {name: common(intervals, windows) for name, intervals in _by_category(events).items()}
    communication = found.pop("communication")
    inside = common(union([i for intervals in found.values() for i in intervals]), optimizer)
    shown, taken = {}, list[Interval]()
    for name, intervals in {"optimizer": inside, **found}.items():  # the order in which they claim a moment
        shown[name], taken = _beyond(intervals, taken)
    hidden = length(common(communication, taken))
    shown["communication_exposed"], taken = _beyond(communication, taken)
    shown["idle"] = length(windows) - length(taken)
    count = len(windows)
    launches = sum(any(start <= moment < end for start, end in windows) for _, moment, _ in events)
    return {
        "schema": BREAKDOWN_VERSION,
        "steps": [steps[0], steps[-1]],
        "rank": rank,
        "source": "gpu" if on_gpu else "cpu",
        "span_ms": round(length(windows) / 1e3 / count, 4),
        "parts": {name: round(shown[name] / 1e3 / count, 4) for name in BREAKDOWN_PARTS},
        "communication_hidden_ms": round(hidden / 1e3 / count, 4),
        "launches": round(launches / count, 2),
    }


def _beyond(intervals: list[Interval], taken: list[Interval]) -> tuple[float, list[Interval]]:
    """How much of ``intervals`` is not in ``taken``, and the union of both."""
    both = union(taken + intervals)
    return length(both) - length(taken), both


def _by_category(events: list[_Work]) -> dict[str, list[Interval]]:
    """Disjoint intervals of every category."""
    found: dict[str, list[Interval]] = {name: [] for name in CATEGORIES}
    for name, start, end in events:
        found[name].append((start, end))
    return {name: union(intervals) for name, intervals in found.items()}


def _complete(trace: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in kinds]


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ranges(trace: dict[str, Any], name: str, kind: str) -> list[Interval]:
    return [_interval(e) for e in _complete(trace, kind) if str(e["name"]).startswith(name)]


def _on_gpu(trace: dict[str, Any]) -> list[_Work]:
    """What the GPU did."""
    events = [
        (e["cat"], e["name"], e.get("args", {}).get("stream", 0), *_interval(e))
        for e in _complete(trace, "kernel", "gpu_memcpy", "gpu_memset")
    ]
    on_stream: dict[int, float] = defaultdict(float)
    for kind, name, stream, start, end in events:
        if kind == "kernel" and category(name) in ("gemm", "fused"):
            on_stream[stream] += end - start
    compute_stream = max(on_stream, key=lambda s: on_stream[s]) if on_stream else None
    found = []
    for kind, name, stream, start, end in events:
        what = category(name) if kind == "kernel" else "other"
        beside = "DtoD" in name and compute_stream is not None and stream != compute_stream
        if kind == "gpu_memcpy" and ("PtoP" in name or beside):
            what = "communication"
        found.append((what, start, end))
    return found


def _on_host(trace: dict[str, Any]) -> list[_Work]:
    """What torch's operators did."""
    events = _complete(trace, "cpu_op", "user_annotation")
    # The transport's own threads copy, too, but beside the step.
    transport = {e["tid"] for e in events if str(e["name"]).startswith("gloo:")}
    found = []
    for e in events:
        name = cpu_category(str(e["name"]))
        if name is not None and (name == "communication" or e["tid"] not in transport):
            found.append((name, *_interval(e)))
    return found
