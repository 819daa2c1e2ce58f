"""The chapter of a training run: its steps, and its samples of operators, ranks and GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_flux.errors import one_line
from megatron_flux.metrics import table
from megatron_flux.metrics.report import figures, ranks
from megatron_flux.metrics.report.figures import Variants
from megatron_flux.metrics.report.page import Chapter, Part, Table, settings_parts
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.summary import VALIDATION, Record, sampled
from megatron_flux.metrics.table import CROSS, UNKNOWN, counted, finite, milliseconds, percent, shown

NOT_RECORDED = "Not recorded"
"""Begins the caption of a part whose data the run does not have: such parts become one table."""

_LAYOUT = ("tp", "pp", "dp", "precision", "fp8")

WAITS_INCLUDED = "GEMM, fused operators and exposed communication together"
"""Comparable between baseline and flux: waiting for peers is in one of the three in either."""

OWN_MEMORY = (
    "Peak memory is that of the rank with the most: torch's allocator and symmetric-memory workspaces, without what "
    "NCCL and CUDA themselves take."
)
REPLAYED = "Calls inside replayed CUDA graphs are neither counted nor timed one by one."
WAITS_COUNT = "Exposed: the time beyond the GEMM alone, including waits for peers in fused kernels."

TIMES = ("time_ms", "gemm_ms", "serial_ms", "exposed_ms")
GPU = {"sm_clock_mhz_min": "slowest SM clock (MHz)", "power_w_max": "largest power (W)"}
TERMS = {
    "p10…p90": "one step in ten is shorter than p10, one in ten longer than p90",
    "MFU": "the model's own FLOPs per second as a share of the GPUs' peak",
    "GEMM": "matrix multiplication, the work that communication can hide behind",
    "exposed communication": "time that communication adds because nothing hides it",
    "E, overlap efficiency": "the share of the communication that is hidden",
    "own time": "a rank's step without flux's operators and gradient reduction, in which it waits for others",
    "straggler": "a rank that is slowest in most samples, by enough to hold up all others",
    "workspace": "symmetric memory, which the GPUs of a group read and write directly",
    "tp, pp, dp": "GPUs that share every layer; stages that share the layers; copies that share the batch",
}


def chapter(run: Run, id_: str) -> Chapter:
    """Return every part of the run's chapter, in order."""
    variants, summary = run.variants, run.summary
    of_ranks: list[ranks.Ranks] = []

    def rank_parts() -> list[Part]:
        of_ranks.extend(ranks.of_variants(variants))
        missing = Part("ranks", "Ranks", caption=f"{NOT_RECORDED}: no step sampled its ranks.")
        return [ranks.part(variants, of_ranks) if of_ranks else missing]

    sampled_parts = [
        *_shown("time", "Where the time goes", lambda: [_breakdown(run)]),
        *_shown("e-overlap", "Overlap efficiency", lambda: _efficiency(variants["flux"], summary["without_gpu"])),
        *_shown("ranks", "Ranks", rank_parts),
        *_shown("gpus", "GPUs", lambda: _gpus(variants)),
    ]
    findings = [*table.findings(summary), *ranks.findings(of_ranks), *(("damage", text) for text in run.problems)]
    parts = [
        Part("comparison", "Comparison", caption=OWN_MEMORY, table=Table(table.rows(summary), table.HEAD)),
        Part("findings", "Findings", table=Table(findings)),
        Part("step-times", "Step time, in order of execution", *figures.step_times(variants)),
        Part("loss", "Loss", *figures.curves(variants, "lm loss", "nat/token", VALIDATION)),
        Part("loss-difference", "Loss, relative difference", *figures.difference(variants, "lm loss")),
        Part("grad-norm", "Gradient norm", *figures.curves(variants, "grad-norm", "")),
        Part("grad-norm-difference", "Gradient norm, relative difference", *figures.difference(variants, "grad-norm")),
        *(part for part in sampled_parts if not part.caption.startswith(NOT_RECORDED)),
    ]
    missing = [part for part in sampled_parts if part.caption.startswith(NOT_RECORDED)]
    if missing:
        # In one table instead of many sections with nothing in them.
        pairs = [(part.title, part.caption.removeprefix(f"{NOT_RECORDED}: ")) for part in missing]
        parts.append(Part("missing", NOT_RECORDED, table=Table(pairs)))
    command = summary.get("command") or run.config.get("command")
    settings = {"command": " ".join(map(str, command)) if isinstance(command, list) else command}
    settings |= {name: summary.get(name) for name in ("layout", "device", "versions")} | {"configuration": run.settings}
    terms = Part("terms", "Terms", table=Table(list(TERMS.items())), folded=True)
    return Chapter(id_, run.name, run.verdict, _subtitle(run), [*parts, terms, *settings_parts(settings)])


def _shown(id_: str, title: str, make: Callable[[], list[Part]]) -> list[Part]:
    """Return the parts of ``make``; one that says so if the data of the run is damaged."""
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return [Part(id_, title, caption=f"The data is damaged: {type(error).__name__}, {one_line(error)}.")]


def _subtitle(run: Run) -> str:
    device, layout, preset = run.summary.get("device"), run.summary.get("layout"), run.settings.get("preset")
    variants = {"baseline": "stock Megatron (baseline)", "flux": "patched Megatron (flux)"}
    words = [variants.get(run.trained_variant or "", "stock Megatron (baseline) against the patched one (flux)")]
    if preset not in (None, run.name):
        words.append(str(preset))
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} {CROSS} {device.get('name', '?')}")
    if isinstance(layout, dict):
        words.append(", ".join(f"{name} {layout[name]}" for name in _LAYOUT if layout.get(name) is not None))
    return "; ".join(words)


def _breakdown(run: Run) -> Part:
    title, found = "Where the time goes", run.breakdowns
    figure = figures.time_parts({variant: one["parts"] for variant, one in found.items()})
    if figure is None:
        return Part("time", title, caption=f"{NOT_RECORDED}: no step was traced; --profile-steps traces some.")
    about, columns = [], []
    for variant, one in found.items():
        parts, steps = one["parts"], one["steps"]
        comparable = sum(parts.get(name) or 0.0 for name in ("gemm", "fused", "communication_exposed"))
        whole = (comparable, one.get("span_ms"), one.get("communication_hidden_ms"))
        columns.append([shown(ms, "{:.2f}".format) for ms in (*map(parts.get, figures.TIME_PARTS), *whole)])
        about.append(
            f"{variant}: steps {steps[0]} to {steps[1]} of rank {one['rank']}, timeline of the {one['source']}."
        )
    about += [
        f"The {variant} variant has no breakdown.json."
        for variant in run.variants
        if run.variants[variant] and variant not in found
    ]
    names = [*figures.TIME_PARTS.values(), WAITS_INCLUDED, "step", "hidden communication (takes no time)"]
    drawn = {trace["name"] for trace in figure["data"]} | set(names[-3:])
    rows = [row for row in zip(names, *columns, strict=True) if row[0] in drawn]
    return Part("time", title, figure, f"{FUSED_WAITS} {' '.join(about)}", Table(rows, head=("ms per step", *found)))


def _efficiency(flux: Sequence[Record], without_gpu: str | None) -> list[Part]:
    if not flux:
        return []
    title = "Overlap efficiency per operator"
    if without_gpu:
        return [Part("e-overlap", title, caption=f"{NOT_RECORDED}: {without_gpu}, so there is no overlap to judge.")]
    samples = [r for r in sampled(flux) if r.get("flux/calls")]
    if not samples:
        replayed = any(r.get("flux/sampled") and r.get("flux/calls") is None for r in flux)
        why = REPLAYED if replayed else "no step sampled its operators."
        return [Part("e-overlap", title, caption=f"{NOT_RECORDED}: {why}")]
    seen: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in samples:
        for call in record["flux/calls"]:
            seen[_key(call)].append(call)
    values = {key: _median(call.get("e_overlap") for call in seen[key]) for key in sorted(seen)}
    drawn = {"<br>".join(map(figures.label, key)): value for key, value in values.items() if value is not None}
    plot = figures.efficiencies(drawn)
    caption = f"{figures.EFFICIENCY} Medians over {counted(len(samples), 'timed sampled step')} of rank 0."
    calls = [call for of_one in seen.values() for call in of_one]
    for reason, count in sorted(Counter(str(call["withheld"]) for call in calls if call.get("withheld")).items()):
        caption += f" Withheld for {count} of {counted(len(calls), 'sampled call')}: {reason}."
    cells = [
        (
            " ".join(key[:2]) + (f", {key[2]}" if key[2:] else ""),
            str(seen[key][-1].get("backend", UNKNOWN)),
            str(seen[key][-1].get("calls", UNKNOWN)),
            *(shown(_median(call.get(name) for call in seen[key]), milliseconds) for name in TIMES),
            shown(value, percent),
        )
        for key, value in values.items()
    ]
    head = ("call", "backend", "calls/step", "ms", "GEMM alone", "serial", "exposed", "E")
    return [Part("e-overlap", title, plot, f"{caption} {WAITS_COUNT}", Table(cells, head))]


def _key(call: dict[str, Any]) -> tuple[str, ...]:
    if call["operator"] == "all_gather":
        return "all_gather", f"{call['m']} {CROSS} {call['k']}"
    weight, dtype = f"k {CROSS} n" if call.get("transposed") else f"n {CROSS} k", str(call.get("dtype"))
    shape = f" {CROSS} ".join(str(call[name]) for name in "mnk")
    return str(call["operator"]), shape, dtype if " x " in dtype else f"weight {weight}"  # FP8's has one form


def _median(values: Iterable[Any]) -> float | None:
    known = [value for value in values if finite(value)]
    return float(np.median(known)) if known else None


def _gpus(variants: Variants) -> list[Part]:
    """Show clocks, power and what held clocks down, which explain noise."""
    throttled = [
        {reason for reason, gpus in record["flux/throttle_reasons"].items() if gpus}
        for records in variants.values()
        for record in sampled(records)
        if record.get("flux/throttle_reasons") is not None
    ]
    if not throttled:
        runs = (record.get("flux/run") or {} for records in variants.values() for record in records)
        why = next((str(run["gpu_source"]) for run in runs if run.get("gpu_source")), "no step sampled its GPUs")
        return [Part("gpus", "Clocks, power and throttling", caption=f"{NOT_RECORDED}: {why}.")]
    counts = Counter(reason for reasons in throttled for reason in reasons)
    held = ", ".join(f"{reason} in {count}" for reason, count in sorted(counts.items())) or "none"
    caption = f"Over all GPUs. Clocks held down, of {counted(len(throttled), 'sample')}: {held}."
    parts = []
    for name, title in GPU.items():
        plot, _ = figures.samples(variants, title, partial(_gpu_value, name))
        parts.append(Part(name.replace("_", "-"), f"GPUs: {title}", plot, caption))
    return parts


def _gpu_value(name: str, record: Record) -> Any:
    return (record.get("flux/gpu") or {}).get(name)
