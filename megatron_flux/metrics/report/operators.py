"""What the operators did in a training run, from its sampled steps: overlap, exposed communication, choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_flux.metrics.report import figures_bars
from megatron_flux.metrics.report.figures import Arms, counted, label
from megatron_flux.metrics.report.parts import NOT_RECORDED, Part, Table
from megatron_flux.metrics.rows import CROSS, MINUS, UNKNOWN, memory, milliseconds
from megatron_flux.metrics.statistics import Record, timed

NOT_SAMPLED = f"{NOT_RECORDED}: no step of this run sampled its operators."
REPLAYED = "Calls inside replayed CUDA graphs are not seen: they are neither counted nor timed one by one."
SAME_STATE_SINCE = 3
"""The schema version from which calls are compared with times from the state that training has put the GPU in."""
EARLIER = "an earlier version compared with times from another state of the GPU"
WAITS_COUNT = "Exposed: the time beyond the GEMM alone, which has what fused kernels wait for their peers."
TIMES = ("time_ms", "gemm_ms", "serial_ms", "exposed_ms")


def parts(arms: Arms) -> list[Part]:
    """The operators' parts of a training chapter."""
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
        return Part("e-overlap", title, caption=f"{NOT_RECORDED}: {REPLAYED}" if replayed else NOT_SAMPLED)
    seen: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    on_gpu = any(record.get("flux/gpu") for record in flux)
    for record in samples:
        for call in record["flux/calls"]:
            seen[_key(call)].append(_sound(call, record, on_gpu=on_gpu))
    order = sorted(seen)
    values = [_median(call.get("e_overlap") for call in seen[key]) for key in order]
    drawn = [(key, value) for key, value in zip(order, values, strict=True) if value is not None]
    labels = ["<br>".join(label(part) for part in key) for key, _ in drawn]
    points = {"flux": ("flux", "diamond", [value for _, value in drawn])}
    figure, caption = figures_bars.efficiencies(labels, points)
    caption += f" Medians over {counted(len(samples), 'sampled step')} of rank 0."
    calls = [call for of_one in seen.values() for call in of_one]
    alone = (call for call in calls if call.get("gemm_ms") is None and not call.get("withheld"))
    caption += "".join(f" Not compared: {reason}." for reason in sorted({str(call.get("source")) for call in alone}))
    for reason, count in sorted(Counter(call["withheld"] for call in calls if call.get("withheld")).items()):
        caption += f" Withheld for {count} of {counted(len(calls), 'sampled call')}: {reason}."
    caption += f" {WAITS_COUNT}"
    table = Table(
        [
            (
                " ".join(key[:2]) + (f", {key[2]}" if key[2:] else ""),
                str(seen[key][-1].get("calls", UNKNOWN)),
                *(_ms(_median(call.get(name) for call in seen[key])) for name in TIMES),
                UNKNOWN if value is None else f"{100 * value:.0f} %".replace("-", MINUS),
            )
            for key, value in zip(order, values, strict=True)
        ],
        head=("call", "calls/step", "ms", "GEMM alone", "in turn", "exposed", "E"),
    )
    return Part("e-overlap", title, figure, caption, table)


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


def _median(values: Iterable[Any]) -> float | None:
    known = [value for value in values if isinstance(value, int | float)]
    return float(np.median(known)) if known else None


def _ms(value: float | None) -> str:
    return UNKNOWN if value is None else milliseconds(value).replace("-", MINUS)


def _activity(flux: Sequence[Record]) -> Part:
    last = flux[-1]
    counts = {
        "all_gather_gemm calls": ("flux/all_gather_gemm_calls", "{:,}".format),
        "gemm_reduce_scatter calls": ("flux/gemm_reduce_scatter_calls", "{:,}".format),
        "received from peers": ("flux/bytes_received", memory),
        "calls left to stock": ("flux/fallback_calls", "{:,}".format),
    }
    pairs = [(text, UNKNOWN if last.get(name) is None else shown(last[name])) for text, (name, shown) in counts.items()]
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
    if not chosen:
        return []
    rows = []
    for call, choice in chosen.items():
        found = choice if isinstance(choice, dict) else {}
        plan = found.get("plan")
        text = " ".join(f"{name}={value}" for name, value in plan.items()) if isinstance(plan, dict) else ""
        times = found.get("ms") if isinstance(found.get("ms"), dict) else {}
        best = _median([min((ms for ms in times.values() if isinstance(ms, int | float)), default=None)])
        rows.append((call, f"{found.get('backend', UNKNOWN)} {text}".strip(), _ms(best)))
    head = ("call", "chosen", "best ms")
    return [Part("choices", "What the tuner chose", table=Table(rows, head))]
