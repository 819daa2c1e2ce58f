"""Predictions and checks for people: tables for the terminal, and a prediction as a page like a run's report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_flux.errors import UserError
from megatron_flux.estimate.job import Job
from megatron_flux.estimate.prediction import LOW_OVERLAP
from megatron_flux.metrics.report import plans, render


def show(plan: dict[str, Any], console: Console) -> None:
    """Print the tables of :func:`~megatron_flux.estimate.prediction.predict`."""
    kind, arms = plan["kind"], plan["arms"]
    console.print(plans.title(plan))
    console.print(_table(("", *arms), plans.step_rows(plan)))
    console.print(plans.speedup(plan))
    console.print(_table((f"{kind}: memory per GPU, GB", *arms), plans.memory_rows(plan)))
    if plan["choices"]:
        console.print(f"{kind}: flux over the link host by what it sends and keeps")
        console.print(_table_of(plan["choices"], plans.CHOICES, plans.CHOICE_ROW))
    if plan["sensitivity"]:
        console.print(f"{kind}: the same job on slower links within a node")
        console.print(_table_of(plan["sensitivity"], plans.LINKS, plans.LINK_ROW))
        console.print(f"low E: overlap efficiency {LOW_OVERLAP:.2f}, or flux's own where that is lower")
    console.print(plans.sources(plan))
    for note in plan["notes"]:
        console.print(f"note: {note}")


def show_validation(found: dict[str, Any], console: Console) -> None:
    """Print what :func:`~megatron_flux.estimate.measured.validate` found."""
    kind, gains = found["kind"], found["speedup_errors"]
    console.print(f"{kind} beside the layer benchmark, ms per layer; constants: {found['constants']}")
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


def write(plan: dict[str, Any], folder: Path) -> None:
    """Write ``plan.json``, and ``plan.html``, a report with the plan as its only chapter."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(plan, indent=2) + "\n")
        (folder / "plan.html").write_text(
            render.html([plans.chapter(plan, "plan")], plans.title(plan)), encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror}; give another folder") from None
