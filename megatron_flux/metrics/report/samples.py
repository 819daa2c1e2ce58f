"""Parts of a training chapter from its sampled steps: what the operators did, and the machine, which explains noise."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import (
    SYMBOLS,
    Arms,
    Drawn,
    efficiencies,
    figure,
    in_order,
    label,
    trace,
)
from megatron_flux.metrics.report.parts import NOT_RECORDED, Part, Table
from megatron_flux.metrics.summary import Record, timed
from megatron_flux.metrics.table import CROSS, MINUS, UNKNOWN, counted, memory, milliseconds, percent, shown

REPLAYED = "Calls inside replayed CUDA graphs are not seen: they are neither counted nor timed one by one."
WAITS_COUNT = "Exposed: the time beyond the GEMM alone, which has what fused kernels wait for their peers."

SAME_STATE_SINCE = 3
"""The schema version from which calls are compared with times from the state that training has put the GPU in."""
EARLIER = "an earlier version compared with times from another state of the GPU"

TIMES = ("time_ms", "gemm_ms", "serial_ms", "exposed_ms")
GPU = {"sm_clock_mhz_min": "slowest SM clock (MHz)", "power_w_max": "largest power (W)"}
PER_RANK = {
    "step_ms": ("step (ms)", 1.0, "{:.1f}"),
    "operators_ms": ("in operators (ms)", 1.0, "{:.1f}"),
    "peak_memory_bytes": ("peak (GiB)", 2.0**30, "{:.2f}"),
    "sm_clock_mhz": ("SM clock (MHz)", 1.0, "{:.0f}"),
    "power_w": ("power (W)", 1.0, "{:.0f}"),
    "temperature_c": ("°C", 1.0, "{:.0f}"),
}


def operator_parts(arms: Arms) -> list[Part]:
    """Overlap, exposed communication, and what the tuner chose."""
    flux = arms["flux"]
    if not flux:
        return [Part("operators", "Flux operators", caption="The flux arm has no records.")]
    return [_efficiency(flux), _activity(flux), *_choices(flux)]


def _efficiency(flux: Sequence[Record]) -> Part:
    title = "Overlap efficiency per operator"
    # Timed steps only, unless sampling met nothing but warm-up.
    samples = [r for r in timed(flux) if r.get("flux/calls")] or [r for r in flux if r.get("flux/calls")]
    if not samples:
        replayed = any(r.get("flux/sampled") and r.get("flux/calls") is None for r in flux)
        why = REPLAYED if replayed else "no step of this run sampled its operators."
        return Part("e-overlap", title, caption=f"{NOT_RECORDED}: {why}")
    seen: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    on_gpu = any(record.get("flux/gpu") for record in flux)
    for record in samples:
        for call in record["flux/calls"]:
            seen[_key(call)].append(_sound(call, record, on_gpu=on_gpu))
    values = {key: _median(call.get("e_overlap") for call in seen[key]) for key in sorted(seen)}
    drawn = {"<br>".join(map(label, key)): value for key, value in values.items() if value is not None}
    plot, caption = efficiencies(list(drawn), {"flux": ("flux", SYMBOLS["flux"], list(drawn.values()))})
    caption += f" Medians over {counted(len(samples), 'sampled step')} of rank 0."
    calls = [call for of_one in seen.values() for call in of_one]
    alone = {str(call.get("source")) for call in calls if call.get("gemm_ms") is None and not call.get("withheld")}
    caption += "".join(f" Not compared: {reason}." for reason in sorted(alone))
    for reason, count in sorted(Counter(call["withheld"] for call in calls if call.get("withheld")).items()):
        caption += f" Withheld for {count} of {counted(len(calls), 'sampled call')}: {reason}."
    rows = [
        (
            " ".join(key[:2]) + (f", {key[2]}" if key[2:] else ""),
            str(seen[key][-1].get("calls", UNKNOWN)),
            *(_ms(_median(call.get(name) for call in seen[key])) for name in TIMES),
            shown(value, percent),
        )
        for key, value in values.items()
    ]
    table = Table(rows, head=("call", "calls/step", "ms", "GEMM alone", "in turn", "exposed", "E"))
    return Part("e-overlap", title, plot, f"{caption} {WAITS_COUNT}", table)


def _sound(call: dict[str, Any], record: Record, *, on_gpu: bool) -> dict[str, Any]:
    """``call``; without a comparison that an earlier version made with times from another state of the GPU."""
    gpu = on_gpu or call.get("source") == "tuner"
    if record.get("schema", 1) >= SAME_STATE_SINCE or not gpu or not call.get("gemm_ms"):
        return call
    return {**call, **dict.fromkeys((*TIMES[1:], "e_overlap")), "withheld": EARLIER}


def _key(call: dict[str, Any]) -> tuple[str, ...]:
    if call.get("operator") == "all_gather":
        return "all_gather", f"{call.get('m', '?')} {CROSS} {call.get('k', '?')}"
    weight = f"k {CROSS} n" if call.get("transposed") else f"n {CROSS} k"
    shape = f" {CROSS} ".join(str(call.get(name, "?")) for name in "mnk")
    return str(call.get("operator", "?")), shape, f"weight {weight}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _median(values: Iterable[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return float(np.median(known)) if known else None


def _ms(value: float | None) -> str:
    return shown(value, milliseconds).replace("-", MINUS)


def _activity(flux: Sequence[Record]) -> Part:
    last = flux[-1]
    whole = "{:,.0f}".format
    pairs = [
        ("all_gather_gemm calls", shown(last.get("flux/all_gather_gemm_calls"), whole)),
        ("gemm_reduce_scatter calls", shown(last.get("flux/gemm_reduce_scatter_calls"), whole)),
        ("received from peers", shown(last.get("flux/bytes_received"), memory)),
        ("calls left to stock", shown(last.get("flux/fallback_calls"), whole)),
    ]
    unseen = "" if last.get("flux/all_gather_gemm_calls") is not None else REPLAYED
    if last.get("flux/wait_timeouts") is not None:
        pairs.append(("waits that ran into their limit", f"{last['flux/wait_timeouts']:,}"))
    if (cost := _median(record.get("flux/metrics_ms") for record in flux)) is not None:
        pairs.append(("recording, median", f"{milliseconds(cost)} ms"))
    return Part("operators", "Flux operators, last step of the recording rank", caption=unseen, table=Table(pairs))


def _choices(flux: Sequence[Record]) -> list[Part]:
    chosen: dict[str, Any] = {}
    for record in flux:
        chosen |= record.get("flux/choices") or {}
    rows = []
    for call, choice in chosen.items():
        found = _mapping(choice)
        plan, times = _mapping(found.get("plan")), _mapping(found.get("ms"))
        text = " ".join(f"{name}={value}" for name, value in plan.items())
        best = min((ms for ms in times.values() if isinstance(ms, int | float)), default=None)
        rows.append((call, f"{found.get('backend', UNKNOWN)} {text}".strip(), _ms(best)))
    return [Part("choices", "What the tuner chose", table=Table(rows, ("call", "chosen", "best ms")))] if rows else []


def machine_parts(arms: Arms) -> list[Part]:
    """Slowest ranks, clocks, power, throttling."""
    gpus = []
    for name, title in GPU.items():
        plot, caption = _samples(arms, title, lambda record, name=name: _mapping(record.get("flux/gpu")).get(name))
        if plot is not None:
            gpus.append(Part(name.replace("_", "-"), f"GPUs: {title}", plot, f"Over all ranks' GPUs, {caption}"))
    gpus = gpus or [Part("gpus", "Clocks and power", caption=_no_gpus(arms))]
    return [_ranks(arms), *gpus, _throttling(arms)]


def _ranks(arms: Arms) -> Part:
    title = "Slowest ranks"
    plot, caption = _samples(arms, "spread of ranks (ms)", lambda record: record.get("flux/rank_spread_ms"))
    if plot is None:
        return Part("ranks", title, caption=f"{NOT_RECORDED}: no step of this run sampled its ranks.")
    caption = (
        f"Longest minus shortest own time of a step over the ranks, {caption} A rank's own time leaves out flux's "
        "operators, where it waits for the others."
    )
    for arm, records in arms.items():
        slowest = Counter(r["flux/slowest_rank"] for r in records if r.get("flux/slowest_rank") is not None)
        if slowest:
            rank, times = slowest.most_common(1)[0]
            caption += f" {arm}: rank {rank} was slowest in {times} of {counted(slowest.total(), 'sample')}."
    return Part("ranks", title, plot, caption, _rank_table(arms))


def _rank_table(arms: Arms) -> Table | None:
    """Medians over the samples, one line per rank and arm."""
    rows: dict[str, dict[str, str]] = {}
    for arm, records in arms.items():
        samples = [record["flux/ranks"] for record in records if record.get("flux/ranks")]
        lists = {name: [s[name] for s in samples if isinstance(s.get(name), list)] for name in PER_RANK}
        ranks = max((len(v) for sample in samples for v in sample.values() if isinstance(v, list)), default=0)
        for rank in range(ranks):
            cells = rows[f"{arm}, rank {rank}"] = {}
            for name, (_, unit, form) in PER_RANK.items():
                found = (values[rank] for values in lists[name] if rank < len(values))
                median = _median(value for value in found if not isinstance(value, bool))
                if median is not None:
                    cells[name] = form.format(median / unit)
    names = [name for name in PER_RANK if any(name in cells for cells in rows.values())]
    if not names:
        return None
    head = ("median of samples", *(PER_RANK[name][0] for name in names))
    return Table([(rank, *(cells.get(name, UNKNOWN) for name in names)) for rank, cells in rows.items()], head)


def _no_gpus(arms: Arms) -> str:
    runs = (record.get("flux/run") for records in arms.values() for record in records)
    why = next((run["gpu_source"] for run in map(_mapping, runs) if run.get("gpu_source")), None)
    return f"{NOT_RECORDED}: {why or 'no step of this run sampled its GPUs'}."


def _throttling(arms: Arms) -> Part:
    title = "Throttling"
    sampled = {
        arm: [r["flux/throttle_reasons"] for r in records if r.get("flux/throttle_reasons") is not None]
        for arm, records in arms.items()
    }
    if not any(sampled.values()):
        return Part("throttling", title, caption=_no_gpus(arms))
    reasons = sorted({reason for samples in sampled.values() for sample in samples for reason in sample})
    if not reasons:
        return Part("throttling", title, caption=f"None in {counted(sum(map(len, sampled.values())), 'sample')}.")
    rows = [
        (reason, *(f"{sum(1 for s in samples if s.get(reason))} of {len(samples)}" for samples in sampled.values()))
        for reason in reasons
    ]
    caption = "Samples in which at least one GPU's clocks were held down, by NVML's reason."
    return Part("throttling", title, caption=caption, table=Table(rows, head=("reason", *sampled)))


def _samples(arms: Arms, title: str, pick: Callable[[Record], Any]) -> Drawn:
    """What ``pick`` takes of each sample over the order of execution; caption: how many samples there are."""
    order = [(arm, pick(record)) for arm, record in in_order(arms)]
    traces, count = [], 0
    for arm in arms:
        points = [(x, y) for x, (of, y) in enumerate(order, 1) if of == arm and _is_number(y)]
        if points:
            count += len(points)
            x, y = zip(*points, strict=True)
            traces.append(trace(arm, arm, x, y, f"{arm} %{{y:.4g}}<br>step %{{x}}", symbol=SYMBOLS[arm], size=8))
    if not traces:
        return None, ""
    caption = f"{counted(count, 'sampled step')} of {len(order)}."
    return figure(traces, "step in order of execution", title, height=280), caption


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
