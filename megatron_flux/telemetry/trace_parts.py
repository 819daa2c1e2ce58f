"""Where the time of profiled steps went, as disjoint parts that add up to the steps: ``breakdown.json``.

Every moment of a step (from its range ``flux::step`` on the host, which begins and ends with an idle device) counts
once: for ``optimizer`` where something other than communication ran inside the range ``flux::optimizer``, else for the
first of ``gemm``, ``fused``, ``attention``, ``norm``, ``other`` that was busy then, else for ``communication_exposed``
where communication ran alone, else for ``idle``. What :mod:`telemetry.trace_breakdown` says of categories and of
communication holds here too.

With a GPU in the trace its own timeline counts. Without one it is the timeline of torch's operators on the host: then
``idle`` is Python, and waits for peers that no operator of torch covers. A profiler slows the host, so that ``idle`` is
an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_flux.metrics.schema import BREAKDOWN_PARTS, BREAKDOWN_VERSION
from megatron_flux.telemetry.intervals import Interval, common, length, union
from megatron_flux.telemetry.kernel_names import cpu_category
from megatron_flux.telemetry.trace_breakdown import by_category, gpu_events

STEP, OPTIMIZER = "flux::step", "flux::optimizer"
"""Names of ranges (a step's is followed by its number)."""

_COMPUTE = ("optimizer", "gemm", "fused", "attention", "norm", "other")
"""In the order in which they are asked whose a moment is."""


def parts(trace: dict[str, Any], steps: Sequence[int], rank: int) -> dict[str, Any]:
    """``breakdown.json`` of a rank's trace; its fields are described in :mod:`megatron_flux.metrics.schema`.

    Args:
        trace: a Chrome trace with the ranges above.
        steps: first and last iteration in it.
        rank: whose trace it is.

    Raises:
        ValueError: the trace holds no step.
    """
    windows = union(_ranges(trace, STEP, "user_annotation"))
    if not windows:
        raise ValueError("the trace holds no range of a step")
    events = gpu_events(trace)
    if events:
        source, launches = "gpu", sum(_inside(e.start, windows) for e in events)
        found = by_category(events)
        optimizer = union(_ranges(trace, OPTIMIZER, "gpu_user_annotation"))
    else:
        source = "cpu"
        found, launches = _on_host(trace, windows)
        optimizer = union(_ranges(trace, OPTIMIZER, "user_annotation"))
    found = {name: common(intervals, windows) for name, intervals in found.items()}
    communication = found.pop("communication")
    found["optimizer"] = common(union([i for intervals in found.values() for i in intervals]), optimizer)
    count = len(windows)
    shown, taken = {}, list[Interval]()
    for name in _COMPUTE:
        shown[name], taken = _beyond(found[name], taken)
    hidden = length(common(communication, taken))
    shown["communication_exposed"], taken = _beyond(communication, taken)
    shown["idle"] = length(windows) - length(taken)
    return {
        "schema": BREAKDOWN_VERSION,
        "steps": [steps[0], steps[-1]],
        "rank": rank,
        "source": source,
        "span_ms": round(length(windows) / 1e3 / count, 4),
        "parts": {name: round(shown[name] / 1e3 / count, 4) for name in BREAKDOWN_PARTS},
        "communication_hidden_ms": round(hidden / 1e3 / count, 4),
        "launches": round(launches / count, 2),
    }


def _beyond(intervals: list[Interval], taken: list[Interval]) -> tuple[float, list[Interval]]:
    """How much of ``intervals`` is not in ``taken``, and both together."""
    together = union(taken + intervals)
    return length(together) - length(taken), together


def _ranges(trace: dict[str, Any], name: str, kind: str) -> list[Interval]:
    return [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") == kind and str(e["name"]).startswith(name)
    ]


def _inside(moment: float, windows: list[Interval]) -> bool:
    return any(start <= moment < end for start, end in windows)


def _on_host(trace: dict[str, Any], windows: list[Interval]) -> tuple[dict[str, list[Interval]], int]:
    """Disjoint intervals of every category of torch's operators, and how many operators there were."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    # The transport's own threads copy, too, but beside the step.
    transport = {e["tid"] for e in events if str(e["name"]).startswith("gloo:")}
    found: dict[str, list[Interval]] = {name: [] for name in (*_COMPUTE, "communication")}
    count = 0
    for e in events:
        name = cpu_category(str(e["name"]))
        if name is None or (e["tid"] in transport and name != "communication"):
            continue
        found[name].append((float(e["ts"]), float(e["ts"]) + float(e["dur"])))
        count += _inside(float(e["ts"]), windows)
    return {name: union(intervals) for name, intervals in found.items()}, count
