"""Predictions and checks for people: tables for the terminal, and a page with two charts of a prediction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_flux.errors import UserError
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.prediction import LOW_OVERLAP

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

PARTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "computation": lambda s: s["pipeline"] - s["bubble"] - s["point_to_point"] - s["tp_exposed"] - s["host"],
    "exposed TP communication": lambda s: s["tp_exposed"],
    "host": lambda s: s["host"],
    "sends between stages": lambda s: s["point_to_point"],
    "pipeline bubble": lambda s: s["bubble"],
    "exposed DP communication": lambda s: s["data"],
    "optimizer": lambda s: s["optimizer"],
}
"""Parts of a step that add up to it."""


def title(plan: dict[str, Any]) -> str:
    """What is predicted, in one line."""
    line = (
        "{preset} on {gpus} x {device}, tp {tp} x pp {pp} x dp {dp}, micro-batch {micro_batch_size} x {micro_batches}, "
        "sequence {shape[seq_length]}, link {link}"
    )
    return f"{plan['kind']}: {line.format_map(plan['job'])}"


def show(plan: dict[str, Any], console: Console) -> None:
    """Print the tables of :func:`~megatron_flux.estimate.prediction.predict`."""
    kind, arms, used = plan["kind"], plan["arms"], plan["inputs"]
    console.print(title(plan))
    steps, memory = ([arm[kind] for arm in arms.values()] for kind in ("step", "memory"))
    cells = [step | {f"{name}_share": value / step["total"] for name, value in step.items()} for step in steps]
    rows = [(name, *(cell.format_map(step) for step in cells)) for name, cell in STEP_ROWS.items()]
    console.print(_table(("", *arms), rows))
    console.print(
        f"{kind}: flux {plan['speedup']:.3f} x as fast ({plan['speedup_undisturbed']:.3f} x if hidden communication "
        "did not slow the rest down)"
    )
    rows = [(name.replace("_", " "), *(f"{of[name]:.1f}" for of in memory)) for name in memory[0]]
    console.print(_table((f"{kind}: memory per GPU, GB", *arms), rows))
    if plan["choices"]:
        console.print(f"{kind}: flux over the link host by what it sends and keeps")
        header = "bits a number|x kept for wgrad|flux, ms|speed-up|memory per GPU, GB"
        row = "{bits}|{keep_gathered}|{flux_ms:,.0f}|{speedup:.2f}|{memory_gb:.1f}"
        console.print(_table_of(plan["choices"], header, row))
    if plan["sensitivity"]:
        console.print(f"{kind}: the same job on slower links within a node")
        header = f"NCCL reaches, GB/s|baseline, ms|flux, ms|speed-up|speed-up, E {LOW_OVERLAP:.2f}|exposed TP"
        row = "{reached_gb_per_s:.0f}|{baseline_ms:,.0f}|{flux_ms:,.0f}|{speedup:.2f}|{speedup_low:.2f}|"
        console.print(_table_of(plan["sensitivity"], header, row + "{tp_exposed_share:.0%}"))
    console.print(f"NCCL reaches {used['nccl_reaches_gb_per_s']:.1f} GB/s per GPU in a node" + _chunks(used))
    console.print(f"times from: {used['gemms']}" + (f"; layers of {used['layers']}" if used["layers"] else ""))
    for note in plan["notes"]:
        console.print(f"note: {note}")


def _chunks(used: dict[str, Any]) -> str:
    reached = used["chunks_reach_gb_per_s"]
    return "" if reached is None else f", flux through host memory {reached:.1f}"


def show_validation(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`~megatron_flux.estimate.measured.validate` found."""
    kind, gains = found["kind"], found["speedup_errors"]
    console.print(f"{kind} beside the layer benchmark, ms per layer; each workload with constants of the others")
    row = "{model}|{seq} x {micro_batch}|{arm}|{measured_ms:.2f}|{predicted_ms:.2f}|{error:+.1%}"
    console.print(_table_of(found["rows"], "model|sequence x micro-batch|arm|measured|predicted|error", row))
    line = "speed-up of flux, {workload}: measured {measured:.3f}, predicted {predicted:.3f}"
    for speedup in found["speedups"]:
        console.print(line.format_map(speedup))
    every = {"mean": found["mean_absolute_error"], "largest": found["largest_absolute_error"]}
    for arm, errors in (found["errors"] | {"all": every}).items():
        console.print(f"error, {arm}: mean {errors['mean']:.1%}, largest {errors['largest']:.1%}")
    if gains:
        console.print(f"error, speed-up of flux: mean {gains['mean']:.3f}, largest {gains['largest']:.3f}")
    console.print(f"{kind} beside its peak memory, GB")
    row = "{workload}|{arm}|{measured_gb:.2f}|{predicted_gb:.2f}|{error:+.1%}"
    console.print(_table_of(found["memory"], "workload|arm|measured|predicted|error", row))


def show_layout(found: dict[str, Any], job: Job, console: Console) -> None:
    """Print what :func:`megatron_flux.estimate.layout.check` found of ``job``."""
    console.print(
        "{gpus} ranks, tp {sizes[tp]} x pp {sizes[pp]} x dp {sizes[dp]}, ".format_map(found)
        + f"{job.run.preset}, each initialised in this process with torch's fake process group"
    )
    rows = []
    for view in found["ranks"]:
        if view["places"]["tp"] == 0:
            tp, nodes = view["groups"]["tp"], sorted({member // job.gpus_per_node for member in view["groups"]["tp"]})
            shown = {"of": f"{tp[0]}-{tp[-1]}", "nodes": _few(nodes), "dp": _few(view["groups"]["dp"])}
            rows.append(view | shown)
    row = "{of}|{nodes}|{places[pp]}|{places[dp]}|{dp}|{link}|{backend}"
    console.print(_table_of(rows, "ranks|node|stage|dp rank|first one's dp group|link|flux backend", row))
    console.print("One layer of each stage, built by megatron-core and run patched over tensors without data:")
    stages = [stage | {"size": " x ".join(map(str, stage["output"]))} for stage in found["stages"]]
    row = "{stage}|{layers}|{parameters:,}|{size}|{flux_layers}"
    console.print(_table_of(stages, "stage|layers|parameters per rank|output|linears that run flux", row))
    reasons = {view["reason"] for view in found["ranks"]}
    if found["linears"] and None in reasons:
        console.print(f"Flux's calls of a layer on {found['device']}, before tuning (m x n x k of a rank):")
        row = "{layer}|{direction}|{op}|{m} x {n} x {k}|{kernel}|{plan}"
        console.print(_table_of(found["linears"], "layer|direction|operator|shape|kernel|plan", row))
    for reason in sorted(reasons - {None}):
        console.print(f"flux runs stock: {reason}")
    for problem in found["problems"]:
        console.print(f"problem: {problem}")
    console.print(f"{len(found['problems'])} problem(s)" if found["problems"] else "every rank fits")


def _few(values: Sequence[int]) -> str:
    shown = ",".join(map(str, values[:4]))
    return shown if len(values) <= 4 else f"{shown},... ({len(values)})"


def _table_of(rows: Iterable[Mapping[str, Any]], header: str, row: str) -> Table:
    """A table of ``rows``; columns of ``header`` and of the format of a ``row`` are divided by ``|``."""
    return _table(header.split("|"), [[cell.format_map(values) for cell in row.split("|")] for values in rows])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A borderless table: the first column to the left, the others to the right."""
    made = Table(box=None, pad_edge=False)
    for i, name in enumerate(header):
        made.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def _step_figure(plan: dict[str, Any]) -> Any:
    """What a step is made of."""
    import plotly.graph_objects as go

    steps, heading = [arm["step"] for arm in plan["arms"].values()], {"text": title(plan), "font": {"size": 13}}
    made = go.Figure()
    for name, part in PARTS.items():
        made.add_bar(name=name, y=list(plan["arms"]), x=list(map(part, steps)), orientation="h")
    return made.update_layout(barmode="stack", title=heading, xaxis_title="ms per step", height=320)


def _link_figure(plan: dict[str, Any]) -> Any:
    """Step time and speed-up over the link."""
    from plotly.subplots import make_subplots

    rows, low = plan["sensitivity"], f"flux, overlap efficiency {LOW_OVERLAP:.2f}"
    rates, made = [row["reached_gb_per_s"] for row in rows], make_subplots(rows=1, cols=2)
    for column, name, key, colour, dash in (
        (1, "baseline", "baseline_ms", "#9aa0a6", "solid"),
        (1, "flux", "flux_ms", "#188038", "solid"),
        (1, low, "flux_low_ms", "#188038", "dot"),
        (2, "flux", "speedup", "#188038", "solid"),
        (2, low, "speedup_low", "#188038", "dot"),
    ):
        shown = {"name": name, "mode": "lines+markers", "line": {"color": colour, "dash": dash}}
        made.add_scatter(x=rates, y=[row[key] for row in rows], showlegend=column == 1, **shown, row=1, col=column)
    heading = {"text": f"{plan['kind']}: the same job on other links within a node", "font": {"size": 13}}
    ticks = {"type": "log", "autorange": "reversed", "tickvals": list(map(round, rates))}
    made.update_layout(title=heading, height=420)
    made.update_xaxes(title="GB/s that NCCL reaches per GPU", **ticks)
    made.update_yaxes(title="ms per step", type="log", row=1, col=1)
    return made.update_yaxes(title="speed-up of flux", row=1, col=2)


def write(plan: dict[str, Any], folder: Path) -> None:
    """Write ``plan.json``, and the charts as ``plan.html``, a page that opens without a network."""
    figures = [_step_figure(plan), *([_link_figure(plan)] if plan["sensitivity"] else [])]
    parts = [figure.to_html(full_html=False, include_plotlyjs=index == 0) for index, figure in enumerate(figures)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan["notes"])
    heading = escape(title(plan))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title></head>'
        f'<body style="font-family: sans-serif"><h1 style="font-size: 1.2rem">{heading}</h1>{"".join(parts)}'
        f"<ul>{notes}</ul></body></html>\n"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
        (folder / "plan.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}; give another folder") from None
