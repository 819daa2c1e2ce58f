"""What the machine did meanwhile, which explains noise: slowest ranks, clocks, power, throttling."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from megatron_flux.metrics.report.figures import STYLE, Arms, Drawn, counted, figure, finite
from megatron_flux.metrics.report.parts import NOT_RECORDED, Part, Table
from megatron_flux.metrics.rows import UNKNOWN
from megatron_flux.metrics.statistics import Record

GPU = {"sm_clock_mhz_min": "slowest SM clock (MHz)", "power_w_max": "largest power (W)"}
PER_RANK = {
    "step_ms": ("step (ms)", 1.0, "{:.1f}"),
    "operators_ms": ("in operators (ms)", 1.0, "{:.1f}"),
    "peak_memory_bytes": ("peak (GiB)", 2.0**30, "{:.2f}"),
    "sm_clock_mhz": ("SM clock (MHz)", 1.0, "{:.0f}"),
    "power_w": ("power (W)", 1.0, "{:.0f}"),
    "temperature_c": ("°C", 1.0, "{:.0f}"),
}


def parts(arms: Arms) -> list[Part]:
    """The machine's parts of a training chapter."""
    return [_ranks(arms), *_gpus(arms), _throttling(arms)]


def _ranks(arms: Arms) -> Part:
    title = "Slowest ranks"
    shown, caption = curve(arms, "flux/rank_spread_ms", "spread of ranks (ms)")
    if shown is None:
        return Part("ranks", title, caption=f"{NOT_RECORDED}: no step of this run sampled its ranks.")
    caption = (
        f"Longest minus shortest own time of a step over the ranks, {caption} A rank's own time leaves out flux's "
    )
    caption += "operators, where it waits for the others."
    for arm, records in arms.items():
        slowest = Counter(r["flux/slowest_rank"] for r in records if r.get("flux/slowest_rank") is not None)
        if slowest:
            rank, times = slowest.most_common(1)[0]
            caption += f" {arm}: rank {rank} was slowest in {times} of {counted(slowest.total(), 'sample')}."
    return Part("ranks", title, shown, caption, _rank_table(arms))


def _rank_table(arms: Arms) -> Table | None:
    """Medians over the samples, one line per rank and arm."""
    rows = []
    known: set[str] = set()
    for arm, records in arms.items():
        samples = [record["flux/ranks"] for record in records if record.get("flux/ranks")]
        count = max((len(v) for sample in samples for v in sample.values() if isinstance(v, list)), default=0)
        for rank in range(count):
            cells: dict[str, str] = {}
            for name, (_, unit, form) in PER_RANK.items():
                values = [_at(sample.get(name), rank) for sample in samples]
                values = [value for value in values if value is not None]
                if values:
                    cells[name] = form.format(float(np.median(values)) / unit)
            known |= set(cells)
            rows.append((f"{arm}, rank {rank}", cells))
    names = [name for name in PER_RANK if name in known]
    if not names:
        return None
    head = ("median of samples", *(PER_RANK[name][0] for name in names))
    return Table([(label, *(cells.get(name, UNKNOWN) for name in names)) for label, cells in rows], head)


def _at(values: Any, rank: int) -> float | None:
    found = values[rank] if isinstance(values, list) and rank < len(values) else None
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _gpus(arms: Arms) -> list[Part]:
    found = []
    for name, title in GPU.items():
        shown, caption = curve(arms, "flux/gpu", title, key=name)
        if shown is not None:
            found.append(Part(name.replace("_", "-"), f"GPUs: {title}", shown, f"Over all ranks' GPUs, {caption}"))
    return found or [Part("gpus", "Clocks and power", caption=_no_gpus(arms))]


def _no_gpus(arms: Arms) -> str:
    for records in arms.values():
        for record in records:
            run = record.get("flux/run")
            if isinstance(run, dict) and run.get("gpu_source"):
                return f"{NOT_RECORDED}: {run['gpu_source']}."
    return f"{NOT_RECORDED}: no step of this run sampled its GPUs."


def _throttling(arms: Arms) -> Part:
    title = "Throttling"
    sampled = {
        arm: [r["flux/throttle_reasons"] for r in records if r.get("flux/throttle_reasons") is not None]
        for arm, records in arms.items()
    }
    if not any(sampled.values()):
        return Part("throttling", title, caption=_no_gpus(arms))
    reasons = sorted({reason for samples in sampled.values() for sample in samples for reason in sample})
    caption = "Samples in which at least one GPU's clocks were held down, by NVML's reason."
    if not reasons:
        count = counted(sum(map(len, sampled.values())), "sample")
        return Part("throttling", title, caption=f"None in {count}.")
    rows = [
        (reason, *(f"{sum(1 for s in samples if s.get(reason))} of {len(samples)}" for samples in sampled.values()))
        for reason in reasons
    ]
    return Part("throttling", title, caption=caption, table=Table(rows, head=("reason", *sampled)))


def curve(arms: Arms, name: str, title: str, key: str | None = None) -> Drawn:
    """A sampled field (or one ``key`` of it) over the order of execution; caption: how many samples there are."""
    order = sorted((record["block"], record["iteration"], arm) for arm, records in arms.items() for record in records)
    position = {(arm, iteration): number for number, (_, iteration, arm) in enumerate(order, 1)}
    traces, counts = [], []
    for arm, records in arms.items():
        points = [
            (position[arm, r["iteration"]], value) for r in records if (value := _value(r, name, key)) is not None
        ]
        if not points:
            continue
        counts.append(len(points))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": arm,
                "meta": {"colour": arm},
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "hovertemplate": f"{arm} %{{y:.4g}}<br>step %{{x}}<extra></extra>",
                "marker": {"symbol": STYLE[arm]["symbol"], "size": 8},
            }
        )
    if not traces:
        return None, ""
    caption = f"{counted(sum(counts), 'sampled step')} of {len(order)}."
    return figure(traces, "step in order of execution", title, height=280), caption


def _value(record: Record, name: str, key: str | None) -> float | None:
    found = record.get(name)
    if key is not None:
        found = found.get(key) if isinstance(found, dict) else None
    return finite(found) if isinstance(found, int | float) else None
