"""Where the time of profiled steps went, as disjoint parts that add up to the steps: ``breakdown.json``.

Every moment of a step (from its range ``flux::step`` on the host, which begins and ends with an idle device) counts
once: for ``optimizer`` where something other than communication ran inside the range ``flux::optimizer``, else for the
first of ``gemm``, ``fused``, ``attention``, ``norm``, ``other`` that was busy then, else for ``communication_exposed``
where communication ran by itself, else for ``idle``. Categories and communication are those of
:mod:`telemetry.trace_categories`.

With a GPU in the trace its own timeline counts. Without one it is the timeline of torch's operators on the host: then
``idle`` is Python, and waits for peers that no operator of torch covers. A profiler slows the host, so that ``idle`` is
an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_flux.metrics.schema import BREAKDOWN_PARTS, BREAKDOWN_VERSION
from megatron_flux.telemetry.trace_categories import (
    CATEGORIES,
    Interval,
    by_category,
    common,
    cpu_category,
    gpu_events,
    length,
    union,
)

STEP, OPTIMIZER = "flux::step", "flux::optimizer"
"""Names of ranges (a step's is followed by its number)."""


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
        found, begins = by_category(events), [e.start for e in events]
        optimizer = union(_ranges(trace, OPTIMIZER, "gpu_user_annotation"))
    else:
        found, begins = _on_host(trace)
        optimizer = union(_ranges(trace, OPTIMIZER, "user_annotation"))
    found = {name: common(intervals, windows) for name, intervals in found.items()}
    communication = found.pop("communication")
    inside = common(union([i for intervals in found.values() for i in intervals]), optimizer)
    shown, taken = {}, list[Interval]()
    for name, intervals in {"optimizer": inside, **found}.items():  # the order in which they claim a moment
        shown[name], taken = _beyond(intervals, taken)
    hidden = length(common(communication, taken))
    shown["communication_exposed"], taken = _beyond(communication, taken)
    shown["idle"] = length(windows) - length(taken)
    count = len(windows)
    launches = sum(any(start <= moment < end for start, end in windows) for moment in begins)
    return {
        "schema": BREAKDOWN_VERSION,
        "steps": [steps[0], steps[-1]],
        "rank": rank,
        "source": "gpu" if events else "cpu",
        "span_ms": round(length(windows) / 1e3 / count, 4),
        "parts": {name: round(shown[name] / 1e3 / count, 4) for name in BREAKDOWN_PARTS},
        "communication_hidden_ms": round(hidden / 1e3 / count, 4),
        "launches": round(launches / count, 2),
    }


def _beyond(intervals: list[Interval], taken: list[Interval]) -> tuple[float, list[Interval]]:
    """How much of ``intervals`` is not in ``taken``, and the union of both."""
    both = union(taken + intervals)
    return length(both) - length(taken), both


def _ranges(trace: dict[str, Any], name: str, kind: str) -> list[Interval]:
    return [
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") == kind and str(e["name"]).startswith(name)
    ]


def _on_host(trace: dict[str, Any]) -> tuple[dict[str, list[Interval]], list[float]]:
    """Disjoint intervals of every category of torch's operators, and when each operator began."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation")]
    # The transport's own threads copy, too, but beside the step.
    transport = {e["tid"] for e in events if str(e["name"]).startswith("gloo:")}
    found: dict[str, list[Interval]] = {name: [] for name in CATEGORIES}
    begins = []
    for e in events:
        name = cpu_category(str(e["name"]))
        if name is None or (e["tid"] in transport and name != "communication"):
            continue
        found[name].append((float(e["ts"]), float(e["ts"]) + float(e["dur"])))
        begins.append(float(e["ts"]))
    return {name: union(intervals) for name, intervals in found.items()}, begins
