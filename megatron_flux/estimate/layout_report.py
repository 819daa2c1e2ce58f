"""A checked topology for people: one line per tensor-parallel group, per stage and per linear layer."""

from __future__ import annotations

from rich.console import Console

from megatron_flux.estimate.layout import Topology
from megatron_flux.estimate.report import table


def show(found: Topology, console: Console) -> None:
    """Print what :func:`megatron_flux.estimate.layout.check` found."""
    job, run = found.job, found.job.run
    console.print(
        f"{job.gpus} ranks, tp {run.tp} x pp {run.pp} x dp {run.dp}, {run.preset}, each initialised in this process "
        "with torch's fake process group"
    )
    rows = []
    for view in found.ranks:
        if view.places["tp"] == 0:
            tp, dp = view.groups["tp"], view.groups["dp"]
            nodes = sorted({member // job.gpus_per_node for member in tp})
            place = (f"{tp[0]}-{tp[-1]}", _list(nodes), str(view.places["pp"]), str(view.places["dp"]), _list(dp))
            rows.append((*place, view.link, view.backend))
    console.print(table(("ranks", "node", "stage", "dp rank", "first one's dp group", "link", "flux backend"), rows))
    console.print("One layer of each stage, built by megatron-core and run patched over tensors without data:")
    header = ("stage", "layers", "parameters per rank", "output", "linears that run flux")
    stages = [
        (str(s.stage), str(s.layers), f"{s.parameters:,}", " x ".join(map(str, s.output)), str(s.flux_layers))
        for s in found.stages
    ]
    console.print(table(header, stages))
    calls = [(c.layer, c.direction, c.op, f"{c.m} x {c.n} x {c.k}", c.kernel, c.plan) for c in found.linears]
    if calls and any(view.reason is None for view in found.ranks):
        console.print(f"Fused calls of a layer on {job.device.key}, before tuning (m x n x k of a rank):")
        console.print(table(("layer", "direction", "operator", "shape", "kernel", "plan"), calls))
    for reason in sorted({view.reason for view in found.ranks if view.reason}):
        console.print(f"flux runs stock: {reason}")
    for problem in found.problems:
        console.print(f"problem: {problem}")
    console.print(f"{len(found.problems)} problem(s)" if found.problems else "every rank fits")


def _list(values: tuple[int, ...] | list[int]) -> str:
    shown = ",".join(map(str, values[:4]))
    return shown if len(values) <= 4 else f"{shown},... ({len(values)})"
