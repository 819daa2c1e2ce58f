"""The chapter of a training run: its steps, and its samples of operators, ranks and GPUs.

A rank's own time is its step without flux's operators and the gradient reduction, in which it waits for others. It is
known only if operators are seen: not in stock, nor inside CUDA graphs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_flux.errors import one_line
from megatron_flux.metrics import table
from megatron_flux.metrics.report import figures
from megatron_flux.metrics.report.figures import Variants
from megatron_flux.metrics.report.page import Chapter, Part, flat
from megatron_flux.metrics.report.run import Run
from megatron_flux.metrics.schema import FUSED_WAITS
from megatron_flux.metrics.strict_json import without_secrets
from megatron_flux.metrics.summary import Record, median, sampled
from megatron_flux.metrics.table import CROSS, UNKNOWN, counted, percent, short, shown

_TIME_PARTS = {
    "gemm": "GEMM",
    "fused": "fused operators",
    "attention": "attention",
    "norm": "norm",
    "optimizer": "optimizer",
    "other": "other kernels",
    "communication_exposed": "exposed communication",
    "idle": "idle",
}
"""Names of a breakdown's disjoint parts."""
_LAYOUT = ("tp", "pp", "dp", "precision", "fp8", "lora")

WAITS_INCLUDED = "GEMM, fused operators and exposed communication together"
"""Comparable between baseline and flux: waiting for peers is in one of the three in either."""
OWN_MEMORY = (
    "Peak memory is that of the rank with the most: torch's allocator and symmetric-memory workspaces, without what "
    "NCCL and CUDA themselves take."
)
EFFICIENCY = (
    "E is 100 %: as fast as the GEMM alone; 0 %: as slow as the collective, then the GEMM. Exposed: the time beyond "
    "the GEMM alone, including waits for peers in fused kernels."
)
MOST_LISTED = 16  # ranks in the table; of more ranks, the slowest

COLUMNS = {
    "own_ms": ("own (ms)", "{:,.1f}".format),
    "step_ms": ("step (ms)", "{:,.1f}".format),
    "operators_ms": ("in operators (ms)", "{:.1f}".format),
    "reduction_ms": ("in the gradient reduction (ms)", "{:.1f}".format),
    "peak_memory_bytes": ("peak (GiB)", lambda size: f"{size / 2**30:.2f}"),
    "sm_clock_mhz": ("SM clock (MHz)", "{:.0f}".format),
    "power_w": ("power (W)", "{:.0f}".format),
    "temperature_c": ("°C", "{:.0f}".format),
}

TERMS = {
    "p10…p90": "one step in ten is shorter than p10, one in ten longer than p90",
    "MFU": "the model's own FLOPs per second as a share of the GPUs' peak",
    "GEMM": "matrix multiplication, the work that communication can hide behind",
    "exposed communication": "time that communication adds because nothing hides it",
    "E, overlap efficiency": "the share of the communication that is hidden",
    "own time": "a rank's step without flux's operators and gradient reduction, in which it waits for others",
    "workspace": "symmetric memory, which the GPUs of a group read and write directly",
    "tp, pp, dp": "GPUs that share every layer; stages that share the layers; copies that share the batch",
}


def chapter(run: Run, id_: str) -> Chapter:
    """Return every part of the run's chapter, in order."""
    variants, summary = run.records, run.summary
    found: list[tuple[str, str]] = table.findings(summary)
    samples: list[Part] = []
    missing: list[tuple[str, str]] = []  # title and reason, instead of sections with nothing in them
    for title, make in {
        "Where the time goes": lambda: _breakdown(run),
        "Overlap efficiency": lambda: _efficiency(variants["flux"], summary["without_gpu"]),
        "Ranks": lambda: ranks_part(variants),
    }.items():
        try:
            made = make()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            made = f"the data is damaged: {type(error).__name__}, {one_line(error)}."
        if isinstance(made, Part):
            samples.append(made)
        elif made:
            missing.append((title, made))
    if held := _throttling(variants):
        found.append(("GPU clocks held down", held))
    else:
        runs = (record.get("flux/run") or {} for records in variants.values() for record in records)
        source = next((f"{run['gpu_source']}." for run in runs if run.get("gpu_source")), "no step sampled its GPUs.")
        missing.append(("Clocks, power and throttling", source))
    found.extend(("damage", text) for text in run.problems)
    parts = [
        Part("comparison", "Comparison", caption=OWN_MEMORY, rows=table.rows(summary), head=table.HEAD),
        Part("findings", "Findings", rows=found),
        Part("step-times", "Step time, in order of execution", *figures.step_times(variants)),
        Part("loss", "Loss", *figures.curves(variants, "lm loss", "nat/token")),
        Part("loss-difference", "Loss, relative difference", *figures.difference(variants, "lm loss")),
        Part("grad-norm", "Gradient norm", *figures.curves(variants, "grad-norm", "")),
        Part("grad-norm-difference", "Gradient norm, relative difference", *figures.difference(variants, "grad-norm")),
        *samples,
        *([Part("missing", "Not recorded", rows=missing)] if missing else []),
        Part("terms", "Terms", rows=list(TERMS.items()), folded=True),
    ]
    command = summary.get("command") or run.config.get("command")
    settings = {"command": " ".join(map(str, command)) if isinstance(command, list) else command}
    settings |= {name: summary.get(name) for name in ("layout", "device", "versions")} | {"configuration": run.settings}
    for name, value in settings.items():
        if value and (pairs := list(flat(without_secrets(value if isinstance(value, Mapping) else {"": value})))):
            parts.append(Part(name, name.capitalize(), rows=pairs, folded=name != "command"))
    return Chapter(id_, run.name, run.verdict, _subtitle(run), parts)


def _subtitle(run: Run) -> str:
    device, layout, preset = run.summary.get("device"), run.summary.get("layout"), run.settings.get("preset")
    variants = {"baseline": "stock Megatron (baseline)", "flux": "patched Megatron (flux)"}
    words = [variants.get(run.trained_variant or "", "stock Megatron (baseline) against the patched one (flux)")]
    words += [str(preset)] if preset else []
    if isinstance(device, dict):
        words.append(f"{device.get('count', '?')} {CROSS} {device.get('name', '?')}")
    if isinstance(layout, dict):
        words.append(", ".join(f"{name} {layout[name]}" for name in _LAYOUT if layout.get(name) is not None))
    return "; ".join(words)


def _breakdown(run: Run) -> Part | str:
    if not (found := run.breakdowns):
        return "no step was traced on a GPU; --profile-steps traces some."
    about, columns = [], []
    for variant, one in found.items():
        parts, (first, last) = one["parts"], one["steps"]
        comparable = sum(parts.get(name) or 0.0 for name in ("gemm", "fused", "communication_exposed"))
        whole = (comparable, one.get("span_ms"), one.get("communication_hidden_ms"))
        columns.append([shown(ms, "{:.2f}".format) for ms in (*map(parts.get, _TIME_PARTS), *whole)])
        about.append(f"{variant}: steps {first} to {last} of rank {one['rank']}.")
    missing = [variant for variant, records in run.records.items() if records and variant not in found]
    about += [f"The {variant} variant has no breakdown.json." for variant in missing]
    names = [*_TIME_PARTS.values(), WAITS_INCLUDED, "step", "hidden communication (takes no time)"]
    rows, caption = list(zip(names, *columns, strict=True)), f"{FUSED_WAITS} {' '.join(about)}"
    return Part("time", "Where the time goes", caption=caption, rows=rows, head=("ms per step", *found))


def _efficiency(flux: Sequence[Record], without_gpu: str | None) -> Part | str:
    """Show the sampled calls, by operator and shape, in a table: medians over the samples."""
    if not flux:
        return ""
    if without_gpu:
        return f"{without_gpu}, so there is no overlap to judge."
    samples = [r for r in sampled(flux) if r.get("flux/calls")]
    if not samples:
        replayed = any(r.get("flux/sampled") and r.get("flux/calls") is None for r in flux)
        graphs = "calls inside replayed CUDA graphs are neither counted nor timed one by one."
        return graphs if replayed else "no step sampled its operators."
    calls = [call for record in samples for call in record["flux/calls"]]
    of_shape: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        of_shape[_shape(call)].append(call)
    times = ("time_ms", "gemm_ms", "serial_ms", "exposed_ms")
    rows = [
        (
            shape,
            *(str(alike[-1].get(name, UNKNOWN)) for name in ("backend", "calls")),
            *(shown(median(call.get(name) for call in alike), short) for name in times),
            shown(median(call.get("e_overlap") for call in alike), percent),
        )
        for shape, alike in sorted(of_shape.items())
    ]
    caption = f"{EFFICIENCY} Medians over {counted(len(samples), 'timed sampled step')} of rank 0."
    withheld = Counter(str(call["withheld"]) for call in calls if call.get("withheld"))
    for reason, count in sorted(withheld.items()):
        caption += f" Withheld for {count} of {counted(len(calls), 'sampled call')}: {reason}."
    head = ("call", "backend", "calls/step", "ms", "GEMM alone", "serial", "exposed", "E")
    return Part("e-overlap", "Overlap efficiency per operator", caption=caption, rows=rows, head=head)


def _shape(call: Mapping[str, Any]) -> str:
    if call["operator"] == "all_gather":
        return f"all_gather {call['m']} {CROSS} {call['k']}"
    weight, dtype = f"k {CROSS} n" if call.get("transposed") else f"n {CROSS} k", str(call.get("dtype"))
    shape = f" {CROSS} ".join(str(call[name]) for name in "mnk")
    return f"{call['operator']} {shape}, {dtype if ' x ' in dtype else f'weight {weight}'}"  # FP8's has one form


def ranks_part(variants: Variants) -> Part | str:
    """Show every rank in a table: of many those with the longest times. Without samples return that as the reason."""
    known = {variant: found for variant, records in variants.items() if (found := _medians_of_ranks(records))}
    if not known:
        return "no step sampled its ranks."
    columns = [name for name in COLUMNS if any(set(medians[name]) != {None} for _, medians in known.values())]
    rows, caption = [], ""
    for variant, (names, medians) in known.items():
        times = medians["step_ms" if medians["own_ms"][0] is None else "own_ms"]
        slowest = sorted(range(len(names)), key=lambda rank: -(times[rank] or 0.0))[:MOST_LISTED]
        if len(names) > MOST_LISTED:
            caption = f"Listed are the {MOST_LISTED} slowest of {len(names)}."
        for rank in sorted(slowest):
            cells = (shown(medians[name][rank], COLUMNS[name][1]) for name in columns)
            rows.append((f"{variant}, {names[rank]}", *cells))
    head = ("", *(COLUMNS[name][0] for name in columns))
    return Part("ranks", "Ranks: medians of sampled steps", caption=caption, rows=rows, head=head)


def _medians_of_ranks(records: Sequence[Record]) -> tuple[list[str], dict[str, list[float | None]]] | None:
    """Return the ranks' names, and one value per rank by column, since the ranks were last placed on nodes."""
    about: Mapping[str, Any] = {}
    usable = {record["iteration"] for record in sampled(records)}
    kept: list[Mapping[str, Any]] = []
    for record in records:
        if run := record.get("flux/run"):
            if any(run.get(name) != about.get(name) for name in ("nodes", "node_of_rank")):
                kept = []  # a requeued job has other nodes: its ranks are others
            about = run
        if record["iteration"] in usable and record.get("flux/ranks"):
            kept.append(record["flux/ranks"])
    if not kept:
        return None
    unknown = [None] * len(kept[-1]["step_ms"])
    known = {name: np.array([ranks.get(name, unknown) for ranks in kept], dtype=float) for name in COLUMNS}
    waits = known["operators_ms"] + np.nan_to_num(known["reduction_ms"])
    known["own_ms"] = known["step_ms"] - np.where(np.any(known["operators_ms"] > 0), waits, np.nan)
    medians = {name: [median(column) for column in values.T.tolist()] for name, values in known.items()}
    nodes = [about["nodes"][place] for place in about.get("node_of_rank", [])] or [""] * len(unknown)
    return [f"rank {rank} on {node}" if node else f"rank {rank}" for rank, node in enumerate(nodes)], medians


def _throttling(variants: Variants) -> str | None:
    """Return what held clocks down, which explains noise; None if no step sampled its GPUs."""
    of_samples = [record.get("flux/throttle_reasons") for records in variants.values() for record in sampled(records)]
    known = [reasons for reasons in of_samples if reasons is not None]
    counts = Counter(reason for reasons in known for reason, gpus in reasons.items() if gpus)
    held = ", ".join(f"{reason} in {count}" for reason, count in sorted(counts.items())) or "none"
    return f"{held}, of {counted(len(known), 'sample')}" if known else None
