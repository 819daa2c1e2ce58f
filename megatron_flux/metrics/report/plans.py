"""The chapter of a plan: what ``megatron-flux slurm plan`` predicts of a job; each part says that it is predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_flux.metrics.report.figures import figure_of, time_parts, trace_of
from megatron_flux.metrics.report.render import Chapter, Figure, Part, Table, settings_parts

Plan = Mapping[str, Any]

STEP_ROWS = {
    "step time, ms": "{total:,.0f}",
    "model FLOP/s utilization": "{mfu:.1%}",
    "model TFLOP/s per GPU": "{tflops_per_gpu:.0f}",
    "exposed TP communication, ms": "{tp_exposed:,.0f} ({tp_exposed_share:.1%})",
    "  its collectives alone, ms": "{tp_collectives:,.0f}",
    "pipeline bubble, ms": "{bubble:,.0f} ({bubble_share:.1%})",
    "sends between stages, ms": "{point_to_point:,.0f} ({point_to_point_share:.1%})",
    "vocabulary layers, ms": "{vocabulary:,.0f} ({vocabulary_share:.1%})",
    "host too slow, ms": "{host:,.0f} ({host_share:.1%})",
    "exposed DP communication, ms": "{data:,.0f} ({data_share:.1%})",
    "optimizer, ms": "{optimizer:,.0f} ({optimizer_share:.1%})",
}

PARTS: dict[str, tuple[str, Callable[[Plan], float]]] = {
    "gemm": ("computation", lambda s: s["pipeline"] - s["bubble"] - s["point_to_point"] - s["tp_exposed"] - s["host"]),
    "communication_exposed": ("exposed TP communication", lambda s: s["tp_exposed"]),
    "other": ("host", lambda s: s["host"]),
    "norm": ("sends between stages", lambda s: s["point_to_point"]),
    "idle": ("pipeline bubble", lambda s: s["bubble"]),
    "attention": ("exposed DP communication", lambda s: s["data"]),
    "optimizer": ("optimizer", lambda s: s["optimizer"]),
}
"""Parts of a step that add up to it, by the colour that they have."""

LINKS = "NCCL reaches, GB/s|baseline, ms|flux, ms|speed-up|speed-up, low E|exposed TP"
LINK_ROW = (
    "{reached_gb_per_s:.0f}|{baseline_ms:,.0f}|{flux_ms:,.0f}|{speedup:.2f}|{speedup_low:.2f}|{tp_exposed_share:.0%}"
)

CHOICES = "bits a number|x kept for wgrad|flux, ms|speed-up|memory per GPU, GB"
CHOICE_ROW = "{bits}|{keep_gathered}|{flux_ms:,.0f}|{speedup:.2f}|{memory_gb:.1f}"


def title(plan: Plan) -> str:
    """What is predicted, in one line."""
    line = (
        "{preset} on {gpus} x {device}, tp {tp} x pp {pp} x dp {dp}, micro-batch {micro_batch_size} x {micro_batches}, "
        "sequence {shape[seq_length]}, link {link}"
    )
    fp8 = plan["job"].get("fp8")
    return f"{plan['kind']}: {line.format_map(plan['job'])}{f', FP8 {fp8}' if fp8 else ''}"


def speedup(plan: Plan) -> str:
    """The gain, in one line."""
    return (
        f"{plan['kind']}: flux {plan['speedup']:.3f} x as fast ({plan['speedup_undisturbed']:.3f} x if hidden "
        "communication did not slow the rest down)"
    )


def step_rows(plan: Plan) -> list[tuple[str, ...]]:
    """What a step of each arm takes, and its parts with their share."""
    steps = [arm["step"] for arm in plan["arms"].values()]
    cells = [step | {f"{name}_share": value / step["total"] for name, value in step.items()} for step in steps]
    return [(name, *(cell.format_map(step) for step in cells)) for name, cell in STEP_ROWS.items()]


def memory_rows(plan: Plan) -> list[tuple[str, ...]]:
    """GB per GPU of each arm."""
    memory = [arm["memory"] for arm in plan["arms"].values()]
    return [(name.replace("_", " "), *(f"{of[name]:.1f}" for of in memory)) for name in memory[0]]


def sources(plan: Plan) -> str:
    """Where the times of GEMMs and layers are from, and what links reach."""
    used = plan["inputs"]
    reached = f"; NCCL reaches {used['nccl_reaches_gb_per_s']:.1f} GB/s per GPU of a tensor-parallel group"
    if used["chunks_reach_gb_per_s"] is not None:
        reached += f", flux through host memory {used['chunks_reach_gb_per_s']:.1f}"
    return f"times from: {used['gemms']}" + (f"; layers of {used['layers']}" if used["layers"] else "") + reached


def chapter(plan: Plan, id_: str, name: str = "") -> Chapter:
    """Every part of the plan's chapter; ``name`` of its folder."""
    kind, arms, rows = plan["kind"], list(plan["arms"]), plan["sensitivity"]
    bars = {arm: {key: part(plan["arms"][arm]["step"]) for key, (_, part) in PARTS.items()} for arm in arms}
    drawn = time_parts(bars, f"step ({kind.lower()})", {key: name for key, (name, _) in PARTS.items()})
    beside = f"{kind} for the same job on other links within a node."
    parts = [
        Part("steps", f"{kind}: one step", drawn, f"{sources(plan)}.", Table(step_rows(plan), ("", *arms))),
        Part("memory", f"{kind}: memory per GPU, GB", table=Table(memory_rows(plan), ("", *arms))),
    ]
    if rows:
        for key, word, of in (("ms", "step time (ms)", "_ms"), ("speedup", "speed-up of flux", "speedup")):
            lines = [("flux", "flux", "flux_ms" if of == "_ms" else "speedup", "solid")]
            lines += [("flux, low overlap efficiency", "flux", "flux_low_ms" if of == "_ms" else "speedup_low", "dot")]
            lines += [("baseline", "baseline", "baseline_ms", "solid")] * (of == "_ms")
            figure = _over_links(rows, f"{word}, {kind.lower()}", lines)
            parts.append(Part(f"links-{key}", f"{kind}: {word} over the link", figure, beside))
        cells = [tuple(cell.format_map(row) for cell in LINK_ROW.split("|")) for row in rows]
        parts.append(Part("links", f"{kind}: other links", table=Table(cells, LINKS.split("|")), caption=beside))
    if choices := plan["choices"]:
        cells = [tuple(cell.format_map(row) for cell in CHOICE_ROW.split("|")) for row in choices]
        beside = f"{kind} for what flux can send and keep over the link host."
        parts.append(Part("choices", f"{kind}: wires", table=Table(cells, CHOICES.split("|")), caption=beside))
    parts.append(Part("notes", "Notes", table=Table([("", note) for note in plan["notes"]])))
    asked = settings_parts({"job": plan["job"], "inputs": plan["inputs"]})
    return Chapter(id_, name or speedup(plan), speedup(plan), title(plan), [*parts, *asked])


def _over_links(rows: list[Plan], y: str, lines: list[tuple[str, str, str, str]]) -> Figure:
    """Lines ``(name, colour, field, dash)`` over what NCCL reaches, fast links first."""
    traces = []
    for name, colour, key, dash in lines:
        points = [(row["reached_gb_per_s"], row[key]) for row in rows]
        made = trace_of(
            name, colour, points, f"{name} %{{y:,.4g}}<br>%{{x:.0f}} GB/s", "circle", 7, mode="lines+markers"
        )
        made["line"]["dash"] = dash
        traces.append(made)
    values = [round(row["reached_gb_per_s"]) for row in rows]
    axis = {"type": "log", "autorange": "reversed", "tickvals": values, "ticktext": list(map(str, values))}
    return figure_of(traces, "GB/s that NCCL reaches per GPU", y, xaxis=axis, height=320)
