"""The tables of the README beside this file, from the raw data beside it; written anew in place.

    PYTHONPATH=. python results/stand-in-8-h200x2/tables.py

They are the text between the two marks; all other figures in that README are in its own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_flux.bench.shapes import Case, cases
from results.readme_tables import SHORT, X, between_marks, chosen, percent, table

HERE = Path(__file__).parent
README = HERE / "README.md"

Json = Mapping[str, Any]

ARMS = {
    "te": "TE (baseline)",
    "local": "local",
    "flux_local": "flux, local layers",
    "flux_te": "flux, TE layers",
    "floor": "no communication",
}


def read(name: str) -> Json:
    """A JSON file of this folder."""
    return json.loads((HERE / name).read_text())


def call(row: Json) -> list[str]:
    """Its name and sizes."""
    name = f"{SHORT[row['op']]} {row['model']} {row['layer']} {row['direction']}"
    return [name, f"{row['m']}{X}{row['n']}{X}{row['k']}"]


def operators(summary: Json) -> str:
    """One row per call."""
    rows = []
    for row in summary["rows"]:
        case = Case(*(row.get(field.name) for field in fields(Case)))
        rate = case.bytes_received(summary["tp"]) / row["nccl_ms"] / 1e6 / summary["link_gb_per_s"]
        names = ("gemm_ms", "nccl_ms", "serial_ms", "fused_ms", "tuned_ms", "bound_ms")
        times = [f"{row[name]:.3f}" for name in names]
        ratio = f"{row['tuned_ms'] / row['bound_ms']:.2f}"
        rows.append([*call(row), *times, ratio, percent(row["e_overlap"]), percent(rate)])
    head = ("call", f"m{X}n{X}k", "GEMM", "NCCL here", "serial here", "fused", "tuned", "bound", "tuned / bound",
            "E here", "NCCL here, of the link's rate")  # fmt: skip
    return table(head, rows)


def workloads(summary: Json) -> dict[str, dict[str, Json]]:
    """Rows by arm, by workload."""
    found: dict[str, dict[str, Json]] = {}
    for row in summary["rows"]:
        found.setdefault(f"{row['model']}, {row['seq']} {X} {row['micro_batch']}", {})[row["arm"]] = row
    return found


def layers(summary: Json) -> str:
    """One row per workload and arm."""
    rows = []
    for title, arms in workloads(summary).items():
        for arm, row in arms.items():
            low, high = (f"{row[f'ms_per_layer_{end}']:.2f}" for end in ("low", "high"))
            rows.append(
                [
                    title,
                    ARMS[arm],
                    f"{row['ms_per_layer']:.2f} ({low}…{high})",
                    f"{row['speedup_vs_te']:.3f}{X}",
                    percent(row["hidden_share"]),
                    f"{row['host_ms_per_step'] / row['layers']:.1f}",
                ]
            )
    return table(("layer", "arm", "ms per layer (quartiles)", "vs TE here", "hidden", "host ms per layer"), rows)


def answer(tuned: Json, case: Case, tp: int) -> tuple[float, float]:
    """GEMM alone and what runs, milliseconds, as the tuner measured them."""
    form = "[k,n]" if case.transposed else "[n,k]"
    start = f"{case.op} m={case.m} n={case.n} k={case.k} bfloat16 {form} tp={tp} "
    (kept,) = (value for key, value in tuned.items() if key.startswith(start))
    return kept["gemm_ms"], kept["ms"][chosen(kept)]


def distance(summary: Json, zeros: Json, tuned: Json, rate: float) -> str:
    """How far flux is from the floor, with random numbers and with zeros, and what the operators account for."""
    rows = []
    others = workloads(zeros)
    for title, arms in workloads(summary).items():
        row, tp = arms["flux_te"], summary["tp"]
        calls = cases([row["model"]], [row["seq"] * row["micro_batch"]], ["forward", "dgrad"], tp)
        over = link = 0.0
        for case in calls:
            gemm, ms = answer(tuned, case, tp)
            over += max(0.0, ms - gemm)
            link += max(0.0, case.bytes_received(tp) / rate / 1e6 - gemm)
        away, cool = (
            there["flux_te"]["ms_per_layer"] - there["floor"]["ms_per_layer"] for there in (arms, others[title])
        )
        rows.append([title, *(f"{value:.2f}".replace("-", "\N{MINUS SIGN}") for value in (away, cool, over, link))])
    head = ("layer", "flux on TE layers over no communication", "the same with zeros as operands",
            "operators over their GEMMs", "of that, link slower than GEMM")  # fmt: skip
    return table(head, rows)


KINDS = {
    "the eight GEMMs that communicate": ("hopper_", "nvjet_sm90_tst"),
    "the four wgrad GEMMs": ("nvjet_sm90_tss",),
    "attention": ("cudnn", "void cudnn"),
    "norms": ("void transformer_engine::normalization",),
}


def kernels(times: Json) -> str:
    """Kernels of one layer by kind, with flux on TE layers and without communication."""
    rows = []
    for workload in ("gpt3-175b-2048x4", "llama-70b-4096x2"):
        for kind, starts in KINDS.items():
            cells = []
            for run in ("layer", "layer-before"):
                flux, floor = (
                    sum(us for name, (us, _) in times[f"{run} {workload} {arm}"].items() if name.startswith(starts))
                    for arm in ("flux_te", "floor")
                )
                cells += [f"{flux / 1000:.2f}", f"{floor / 1000:.2f}", f"{flux / floor:.2f}"]
            rows.append([workload, kind, *cells])
    head = ("flux, TE layers", "no communication", "ratio")
    return table(("layer", "kernels", *head, *(f"{name}, `layer-before`" for name in head)), rows)


def tables() -> str:
    """All of them, with their headings."""
    names = ("m8192", "m2048", "layer", "layer-before", "layer-zeros", "m8192-before")
    large, small, layer, before, zeros, link = (read(f"{name}/summary.json") for name in names)
    rows = {**large, "rows": [*large["rows"], *small["rows"]]}
    (times,) = read("kernels.json").values()
    return (
        f"### Operators, forward, milliseconds\n\n{operators(rows)}\n"
        f"### Layers, forward and backward\n\n{layers(layer)}\n"
        f"### Layers, a little before on another machine (`layer-before`, five rounds)\n\n{layers(before)}\n"
        f"### How far from no communication, milliseconds per layer (`layer-before`, `layer-zeros`)\n\n"
        f"{distance(before, zeros, read('layer-before/tuned.json'), link['link_gb_per_s'])}\n"
        f"### Kernels of one traced step, milliseconds per layer (`kernels.json`)\n\n{kernels(times)}"
    )


def rewritten(text: str) -> str:
    """The README's text with the tables as they are now."""
    return between_marks(text, tables())


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
