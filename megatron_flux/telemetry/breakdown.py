"""Split the time in a trace of torch.profiler: by category of work (:func:`of_layers`), or as disjoint parts of steps.

Definitions, all of one rank:

* busy time of a category: the time during which at least one of its kernels ran (the length of the intervals' union).
  A kernel that shares the GPU with another runs slower, and its busy time shows it.
* communication: kernels of NCCL, userbuffers and symmetric memory, copies between GPUs, and copies within the device
  that run beside the stream of the GEMMs (some drivers report a copy to memory mapped from a peer as such).
* exposed: the part of communication's busy time during which no kernel of another category ran; hidden: the rest.
* idle: the part of the span, from the first kernel's begin to the last one's end, in which nothing ran.

The parts of a step (:func:`of_steps`) add up to it. A step is its range ``flux::step`` on the host, which begins and
ends with an idle device. Every moment counts once: for ``optimizer`` if something other than communication ran inside
the range ``flux::optimizer``, else for the first of ``gemm``, ``fused``, ``attention``, ``norm``, ``other`` that was
busy, else for ``communication_exposed`` if communication ran, else for ``idle``.

Only the GPU's own timeline counts. A profiler slows the host, so ``idle`` is an upper bound.

Limit: communication inside a fused kernel cannot be separated from its GEMM; it shows as a ``fused`` time longer than
the GEMM would take.

Only this module knows names of kernels. Rules are tried in order, so the first decides a name that fits
two: flux's kernels are GEMMs too, cuDNN's attention contains the word of a GEMM instruction, and a compiled norm is
also a compiled elementwise kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from megatron_flux.metrics.schema import BREAKDOWN_PARTS, SCHEMA_VERSION

CATEGORIES = ("gemm", "fused", "communication", "attention", "norm", "other")
STEP, OPTIMIZER = "flux::step", "flux::optimizer"
"""Names of ranges (a step's is followed by its number)."""

_KERNELS = {
    # megatron_flux.kernels: GEMM and communication in one kernel. Inductor's "triton_poi_fused_..." are no such thing.
    "fused": re.compile(r"(?<![a-z])(ag_gemm|gemm_rs|gemm_one_shot)_", re.IGNORECASE),
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

Interval = tuple[float, float]
"""Begin and end in microseconds."""
_Work = dict[str, list[Interval]]
"""Intervals in which a category ran."""


@cache
def category(kernel: str) -> str:
    """Return the category of a kernel's name, one of :data:`CATEGORIES`; ``other`` if no rule fits."""
    return next((name for name, rule in _KERNELS.items() if rule.search(kernel)), "other")


def of_layers(trace: dict[str, Any], layers: int) -> dict[str, float]:
    """Return the times of one step of ``layers`` layers, in milliseconds per layer; empty if the GPU did nothing.

    ``<category>_ms`` of every category, ``communication_exposed_ms``, ``communication_hidden_ms``, ``idle_ms``,
    ``span_ms``, and ``launches``: kernels, copies and fills per layer.
    """
    work = _on_gpu(trace)
    if not any(work.values()):
        return {}
    busy, lengths = _stretches(work)
    communication = busy["communication"]
    compute = np.any([moments for name, moments in busy.items() if name != "communication"], axis=0)
    shown = {f"{name}_ms": moments for name, moments in busy.items()} | {
        "communication_exposed_ms": communication & ~compute,
        "communication_hidden_ms": communication & compute,
        "idle_ms": ~(communication | compute),
        "span_ms": communication | ~communication,
    }
    times = {name: round(float(lengths[moments].sum()) / 1e3 / layers, 4) for name, moments in shown.items()}
    return {**times, "launches": round(sum(map(len, work.values())) / layers, 2)}


def of_steps(trace: dict[str, Any], steps: Sequence[int], rank: int) -> dict[str, Any]:
    """Return ``breakdown.json`` (docs/metrics.md) of the trace of ``rank``.

    ``steps``: first and last iteration in the trace, which has the ranges above. Raises ValueError: it has no step, or
    nothing ran on a GPU.
    """
    windows, work = _ranges(trace, STEP, "user_annotation"), _on_gpu(trace)
    if not windows or not any(work.values()):
        raise ValueError("the trace holds no range of a step, or no work of a GPU")
    ranges = {"step": windows, "optimizer": _ranges(trace, OPTIMIZER, "gpu_user_annotation")}
    busy, lengths = _stretches(work | ranges)
    step, optimizer, communication = (busy.pop(name) for name in ("step", "optimizer", "communication"))
    compute = np.any(list(busy.values()), axis=0)

    def per_step(moments: np.ndarray) -> float:
        return round(float(lengths[moments].sum()) / 1e3 / len(windows), 4)

    parts, left = {}, step
    # In the order in which they claim a moment.
    for name, moments in {
        **{"optimizer": optimizer & compute},
        **busy,
        **{"communication_exposed": communication, "idle": step},
    }.items():
        parts[name] = per_step(left & moments)
        left = left & ~moments
    begins = [begin for intervals in work.values() for begin, _ in intervals]
    launches = sum(any(start <= begin < end for start, end in windows) for begin in begins)
    return {
        "schema": SCHEMA_VERSION,
        "steps": [steps[0], steps[-1]],
        "rank": rank,
        "span_ms": per_step(step),
        "parts": {name: parts[name] for name in BREAKDOWN_PARTS},
        "communication_hidden_ms": per_step(step & communication & compute),
        "launches": round(launches / len(windows), 2),
    }


def _stretches(work: Mapping[str, Sequence[Interval]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return, by kind of work, if it ran in each stretch between two begins or ends of anything; and their lengths."""
    edges = np.unique([moment for intervals in work.values() for interval in intervals for moment in interval])
    busy = {}
    for name, intervals in work.items():
        begins, ends = np.searchsorted(edges, np.array(intervals).reshape(-1, 2).T)
        running = np.bincount(begins, minlength=len(edges)) - np.bincount(ends, minlength=len(edges))
        busy[name] = running.cumsum()[:-1] > 0
    return busy, np.diff(edges)


def _complete(trace: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in kinds]


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ranges(trace: dict[str, Any], name: str, kind: str) -> list[Interval]:
    return [_interval(e) for e in _complete(trace, kind) if str(e["name"]).startswith(name)]


def _on_gpu(trace: dict[str, Any]) -> _Work:
    events = _complete(trace, "kernel", "gpu_memcpy", "gpu_memset")
    streams = [event.get("args", {}).get("stream", 0) for event in events]
    computing: Counter[int] = Counter()
    for event, stream in zip(events, streams, strict=True):
        if event["cat"] == "kernel" and category(event["name"]) in ("gemm", "fused"):
            computing[stream] += event["dur"]
    main = max(computing, key=computing.__getitem__, default=None)
    work: _Work = {name: [] for name in CATEGORIES}
    for event, stream in zip(events, streams, strict=True):
        name = event["name"]
        what = category(name) if event["cat"] == "kernel" else "other"
        beside = "DtoD" in name and main not in (None, stream)
        if event["cat"] == "gpu_memcpy" and ("PtoP" in name or beside):
            what = "communication"
        work[what].append(_interval(event))
    return work
