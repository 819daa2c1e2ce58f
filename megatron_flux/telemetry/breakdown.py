"""Split the time in a trace of torch.profiler: by category of work (:func:`of_layers`), or as disjoint parts of steps.

Definitions, all of one rank:

* busy time of a category: the time during which at least one of its kernels ran. A kernel that shares the GPU with
  another runs slower, and its busy time shows it.
* communication: kernels of NCCL, userbuffers and symmetric memory, copies between GPUs, and copies within the device
  that run beside the stream of the GEMMs (some drivers report a copy to memory mapped from a peer as such).
* a step: its range ``flux::step`` on the host, which begins and ends with an idle device.
* parts of a step, which add up to it: every moment counts once. For ``optimizer`` if something other than communication
  ran inside the range ``flux::optimizer``, else for the first of ``gemm``, ``fused``, ``attention``, ``norm``,
  ``other`` that was busy, else for ``communication_exposed`` if communication ran, else for ``idle``.
* hidden communication: the time of communication while something else ran; exposed: the rest.

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

STEP, OPTIMIZER = "flux::step", "flux::optimizer"  # names of ranges (a step's is followed by its number)

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

_CATEGORIES = ("gemm", "fused", "communication", "attention", "norm", "other")
_Intervals = list[tuple[float, float]]  # begins and ends in microseconds


@cache
def category(kernel: str) -> str:
    """Return the category of a kernel's name: ``other`` if no rule fits."""
    return next((name for name, rule in _KERNELS.items() if rule.search(kernel)), "other")


def of_layers(trace: dict[str, Any], layers: int) -> dict[str, float]:
    """Return the times of one step of ``layers`` layers, in milliseconds per layer; empty if the GPU did nothing.

    ``<category>_ms`` of every category, ``communication_exposed_ms``, ``communication_hidden_ms``, ``idle_ms``,
    ``span_ms`` from the first kernel's begin to the last one's end, and ``launches`` of kernels, copies and fills.
    """
    work = _on_gpu(_complete(trace))
    if not any(work.values()):
        return {}
    ran, lengths = _stretches(work)
    communication = ran["communication"]
    compute = np.any([moments for name, moments in ran.items() if name != "communication"], axis=0)
    shown = {
        **ran,
        "communication_exposed": communication & ~compute,
        "communication_hidden": communication & compute,
        "idle": ~(communication | compute),
        "span": np.ones_like(compute),
    }
    times = {f"{name}_ms": round(float(lengths[moments].sum()) / 1e3 / layers, 4) for name, moments in shown.items()}
    return {**times, "launches": round(sum(map(len, work.values())) / layers, 2)}


def of_steps(trace: dict[str, Any], steps: Sequence[int], rank: int) -> dict[str, Any]:
    """Return ``breakdown.json`` (docs/metrics.md) of the trace of ``rank`` over ``steps``, first to last.

    Raises ValueError: the trace has no range of a step, or nothing ran on a GPU.
    """
    events = _complete(trace)
    windows, work = _ranges(events, STEP, "user_annotation"), _on_gpu(events)
    if not windows or not any(work.values()):
        raise ValueError("the trace holds no range of a step, or no work of a GPU")
    ranges = {"step": windows, "optimizer": _ranges(events, OPTIMIZER, "gpu_user_annotation")}
    ran, lengths = _stretches(work | ranges)
    left, optimizer, communication = (ran.pop(name) for name in ("step", "optimizer", "communication"))
    compute = np.any(list(ran.values()), axis=0)

    def per_step(moments: np.ndarray) -> float:
        return round(float(lengths[moments].sum()) / 1e3 / len(windows), 4)

    span, hidden = per_step(left), per_step(left & communication & compute)
    claims = {"optimizer": optimizer & compute, **ran, "communication_exposed": communication, "idle": left}
    parts = {}
    for name, moments in claims.items():
        parts[name] = per_step(left & moments)
        left = left & ~moments
    begun = [begin for intervals in work.values() for begin, _ in intervals]
    launches = sum(any(start <= begin < end for start, end in windows) for begin in begun)
    return {
        "schema": SCHEMA_VERSION,
        "steps": [steps[0], steps[-1]],
        "rank": rank,
        "span_ms": span,
        "parts": {name: parts[name] for name in BREAKDOWN_PARTS},
        "communication_hidden_ms": hidden,
        "launches": round(launches / len(windows), 2),
    }


def _stretches(work: Mapping[str, _Intervals]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return, by kind of work, if it ran in each stretch between two begins or ends of anything; and their lengths."""
    edges = np.unique([moment for intervals in work.values() for interval in intervals for moment in interval])
    ran = {}
    for name, intervals in work.items():
        begins, ends = np.searchsorted(edges, np.array(intervals).reshape(-1, 2).T)
        change = np.bincount(begins, minlength=len(edges)) - np.bincount(ends, minlength=len(edges))
        ran[name] = change.cumsum()[:-1] > 0
    return ran, np.diff(edges)


def _complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def _interval(event: dict[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ranges(events: list[dict[str, Any]], name: str, kind: str) -> _Intervals:
    return [_interval(e) for e in events if e.get("cat") == kind and str(e["name"]).startswith(name)]


def _on_gpu(events: list[dict[str, Any]]) -> dict[str, _Intervals]:
    found = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            what = category(event["name"]) if event["cat"] == "kernel" else "other"
            found.append((event, what, event.get("args", {}).get("stream", 0)))
    computing: Counter[int] = Counter()
    for event, what, stream in found:
        if what in ("gemm", "fused"):
            computing[stream] += event["dur"]
    main = max(computing, key=computing.__getitem__, default=None)
    work: dict[str, _Intervals] = {name: [] for name in _CATEGORIES}
    for event, what, stream in found:
        beside = "DtoD" in event["name"] and main not in (None, stream)
        between_gpus = event["cat"] == "gpu_memcpy" and ("PtoP" in event["name"] or beside)
        work["communication" if between_gpus else what].append(_interval(event))
    return work
