"""The tables in the READMEs of the folders named below, from the raw data beside each; written anew in place.

    PYTHONPATH=. python results/tables.py [FOLDER ...]

They are the text between the two marks; all other figures of a README are in its own words. ``stand-in-8-h200x2`` has
a script of its own.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_flux.bench.shapes import cases
from megatron_flux.metrics.summary import relative_differences, spread
from results.ops_tables import beside, named, operators
from results.readme_tables import SHORT, X, between_marks, chosen, percent, table

HERE = Path(__file__).parent

Json = Mapping[str, Any]
Steps = Sequence[Mapping[str, Any]]

MODELS = ("gpt3", "llama")
ARMS = {
    "te": "TE (baseline)",
    "local": "local layers, stock",
    "te_ub": "TE userbuffers",
    "flux_te_own_gather": "flux, TE layers, own gather",
    "flux_te": "flux, TE layers",
    "flux_te_defer": "flux, TE layers, wgrad deferred",
    "flux_local": "flux, local layers",
    "flux_te_fp8wire": "flux, TE layers, all calls with an fp8 wire",
    "flux_local_fp8wire": "flux, local layers, all calls with an fp8 wire",
    "floor": "no communication",
    "busy_floor": "no communication, busy links",
}


def models(run: str) -> list[str]:
    """The folders of a run over the two large models."""
    return [f"{run}/{model}" for model in MODELS]


def read(name: str) -> Json:
    """A JSON file of these folders."""
    return json.loads((HERE / name).read_text())


def lines(name: str) -> list[Json]:
    """A file with one JSON object per line."""
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def with_quartiles(row: Json) -> str:
    """Milliseconds per layer of an arm."""
    low, high = (f"{row[f'ms_per_layer_{end}']:.2f}" for end in ("low", "high"))
    return f"{row['ms_per_layer']:.2f} ({low}…{high})"


def layers(runs: Iterable[str]) -> str:
    """One row per arm of each run of ``bench layer``; nothing is exposed where no step was traced.

    ¹, which the READMEs explain: what a fused kernel waits for its peers is in no figure of exposed communication.
    """
    rows = []
    for run in runs:
        for row in read(f"{run}/summary.json")["rows"]:
            memory, exposed = row["peak_memory_gb"], row["breakdown"].get("communication_exposed_ms")
            rows.append(
                [
                    f"{row['model']}, {row['seq']} {X} {row['micro_batch']}",
                    ARMS[row["arm"]],
                    with_quartiles(row),
                    f"{row['speedup_vs_te']:.3f}{X}",
                    percent(row["hidden_share"]),
                    "-" if exposed is None else f"{exposed:.2f}",
                    f"{row['sm_clock_mhz']:.0f}",
                    f"{row['host_ms_per_step']:.1f}",
                    "-" if memory is None else f"{memory:.2f}",
                ]
            )
    head = ("layer", "arm", "ms per layer (quartiles)", "vs TE", "hidden", "exposed ¹, ms per layer", "MHz",
            "host ms per step", "peak GB")  # fmt: skip
    return table(head, rows)


def connections(one: str, other: str) -> str:
    """Two runs that differ in ``CUDA_DEVICE_MAX_CONNECTIONS`` alone, beside each other: one row per arm."""
    runs = [read(f"{run}/summary.json") for run in (one, other)]
    first, second = (run["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] for run in runs)
    rows = []
    for pair in zip(*(run["rows"] for run in runs), strict=True):
        before, after = (row["ms_per_layer"] for row in pair)
        rows.append(
            [
                ARMS[pair[0]["arm"]],
                *map(with_quartiles, pair),
                percent(after / before - 1, 1, "+"),
                *(f"{row['speedup_vs_te']:.3f}{X}" for row in pair),
                " / ".join(f"{row['sm_clock_mhz']:.0f}" for row in pair),
                " / ".join(f"{row['host_ms_per_step']:.1f}" for row in pair),
            ]
        )
    ms, ratio, both = "ms per layer (quartiles)", "vs TE", f"{first} / {second}"
    head = ("arm", f"{first}: {ms}", f"{second}: {ms}", f"{second} over {first}", f"{first}: {ratio}",
            f"{second}: {ratio}", f"MHz, {both}", f"host ms per step, {both}")  # fmt: skip
    return table(head, rows)


def fastest(times: Mapping[str, float], narrow: bool) -> float | None:
    """Milliseconds of the fastest fused plan with tiles of 128 x 128 (``narrow``) or 128 x 256."""
    own = [ms for name, ms in times.items() if name.startswith("fused") and ("bn=128" in name) is narrow]
    return min(own, default=None)


def tiles(times: Mapping[str, float]) -> list[str]:
    """Of a call: 128 x 256, 128 x 128, and the latter over the former."""
    wide, narrow = (fastest(times, narrow) for narrow in (False, True))
    both = percent(narrow / wide - 1, 1, "+") if wide and narrow else "-"
    return [*("-" if ms is None else f"{ms:.3f}" for ms in (wide, narrow)), both]


LARGE = (("gpt3-175b", 8192), ("llama-70b", 8192))
"""Models and tokens."""

LEFT_OUT = (("gpt3-175b", 2048), ("llama-405b", 8192))
"""The same, of the layers that came after those."""


def choices(path: str, tp: int, workloads: Sequence[tuple[str, int]] = LARGE) -> str:
    """What the tuner measured and chose: one row per call of each model with its tokens."""
    tuned, rows = read(path), []
    calls = (case for model, m in workloads for case in cases([model], [m], ["forward", "dgrad"], tp))
    for case in calls:
        form = "[k,n]" if case.transposed else "[n,k]"
        start = f"{case.op} m={case.m} n={case.n} k={case.k} bfloat16 {form} tp={tp} "
        (kept,) = (value for key, value in tuned.items() if key.startswith(start))
        rows.append(
            [
                *named(asdict(case)),
                f"{kept['gemm_ms']:.3f}",
                *tiles(kept["ms"]),
                *(tiles(kept["sustained_ms"]) if "sustained_ms" in kept else []),
                chosen(kept).removeprefix("fused "),
            ]
        )
    kinds = ("bursts", "lasting") if "sustained_ms" in next(iter(tuned.values())) else ("bursts",)
    head = [f"{kind}, {what}" for kind in kinds for what in (f"128{X}256", f"128{X}128", "difference")]
    return table(("call", f"m{X}n{X}k", "GEMM, bursts", *head, "chosen"), rows)


KINDS = {
    "GEMMs that communicate": ("hopper_", "nvjet_sm90_tst"),
    "wgrad GEMMs": ("nvjet_sm90_tss",),
    "attention": ("cudnn", "void cudnn"),
    "norms": ("void transformer_engine::normalization",),
    "NCCL": ("nccl",),
    "copies to peers": ("Memcpy PtoP",),
}


def kernels(folder: str, runs: Iterable[str]) -> str:
    """Kernels of one traced step by kind, milliseconds per layer; ``runs`` are folders in ``folder``."""
    (times,) = read(f"{folder}/kernels.json").values()
    rows = []
    for path in runs:
        run = path.partition("/")[0]
        for row in read(f"{folder}/{path}/summary.json")["rows"]:
            workload = f"{row['model']}-{row['seq']}x{row['micro_batch']}"
            sums = times[f"{run} {workload} {row['arm']}"]
            cells = [
                sum(us for name, (us, _) in sums.items() if name.startswith(starts)) / 1000 for starts in KINDS.values()
            ]
            rows.append([run, workload, ARMS[row["arm"]], *(f"{ms:.2f}" if ms else "-" for ms in cells)])
    return table(("run", "layer", "arm", *KINDS), rows)


def backward(path: str) -> str:
    """The GEMMs of backward in the order they ran, microseconds, median over the layers of one traced step."""
    (steps,) = read(path).values()
    names = [f"{layer} {what}" for layer in ("FC2", "FC1", "proj", "QKV") for what in ("dgrad", "wgrad")]
    rows = []
    for key, step in steps.items():
        workload, arm = key.split()
        count = len(step) // 12  # a layer: four calls forward, eight GEMMs backward
        times = [us for _, us, _ in step[4 * count :]]
        cells = [f"{median(times[place :: len(names)]):.0f}" for place in range(len(names))]
        rows.append([workload, ARMS[arm], *cells])
    return table(("layer", "arm", *names), rows)


def turns(path: str) -> str:
    """Plans of one operator timed in turns: medians of the two repeats, milliseconds."""
    calls: dict[str, list[Json]] = {}
    for row in lines(path):
        form = "[k,n]" if row["transposed"] else "[n,k]"
        calls.setdefault(f"{row['m']}{X}{row['n']}{X}{row['k']} {form}", []).append(row)
    plans = dict.fromkeys(name for rows in calls.values() for row in rows for name in row["ms"] if name != "gemm")
    text = []
    for plan in [*plans, "gemm"]:
        cells = (" / ".join(f"{median(row['ms'][plan]):.3f}" for row in rows if plan in row["ms"]) or "-"
                 for rows in calls.values())  # fmt: skip
        text.append(["GEMM alone" if plan == "gemm" else plan, *cells])
    text.append(["bytes at the link's rate", *(f"{rows[0]['bound_ms']:.3f}" for rows in calls.values())])
    return table(("plan", *calls), text)


def energy(path: str) -> str:
    """GEMMs in bursts and lasting, one row per way and one column per shape; then clock and power where sampled."""
    rows = lines(path)
    shapes: dict[str, dict[str, Json]] = {}
    for row in rows:
        shapes.setdefault(f"{row['m']}{X}{row['n']}{X}{row['k']}", {})[row["way"]] = row
    ways = list(dict.fromkeys(row["way"] for row in rows))

    def made(cell: Callable[[Mapping[str, Json], str], str]) -> str:
        return table(("way", *shapes), ([way, *(cell(found, way) for found in shapes.values())] for way in ways))

    def times(found: Mapping[str, Json], way: str) -> str:
        return f"{found[way]['burst_ms']:.3f} / {found[way]['ms']:.3f}"

    def against(found: Mapping[str, Json], way: str) -> str:
        return " / ".join(percent(found[way][kind] / found["cublas"][kind] - 1, 1, "+") for kind in ("burst_ms", "ms"))

    def longer(found: Mapping[str, Json], way: str) -> str:
        return percent(found[way]["ms"] / found[way]["burst_ms"] - 1, 1, "+")

    def sampled(found: Mapping[str, Json], way: str) -> str:
        return "-" if found[way]["mhz"] is None else f"{found[way]['mhz']} / {found[way]['watts']:.0f}"

    return (
        f"### Milliseconds, bursts / lasting\n\n{made(times)}\n"
        f"### Over cuBLAS in one piece, bursts / lasting\n\n{made(against)}\n"
        f"### Lasting over bursts\n\n{made(longer)}\n"
        f"### MHz / W while it lasts\n\n{made(sampled)}"
    )


CURVES = ("lm loss", "grad-norm")


def trainings(path: str) -> dict[str, Steps]:
    """Of a file of curves: by run what each step recorded, by the file's columns."""
    data = read(path)
    columns = ["iteration" if column == "step" else column for column in data["columns"]]
    return {run: [dict(zip(columns, step, strict=True)) for step in steps] for run, steps in data["runs"].items()}


def apart(run: Steps, other: Steps, curve: str) -> list[float]:
    """Relative differences of ``run`` from ``other`` over the steps that both have, in their order."""
    return [difference for _, difference in relative_differences(other, run, curve)]


def curves(path: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Relative differences between trainings, mean and largest over the steps; one row per pair."""
    runs = trainings(path)
    half = max(map(len, runs.values())) // 2
    rows = []
    for run, other in pairs:
        found = {curve: apart(runs[run], runs[other], curve) for curve in CURVES}
        cells = [f"{percent(fmean(of), 2)}, {percent(max(of), 1)}" for of in found.values()]
        count = len(found["lm loss"])
        rows.append([run, other, str(count), *cells, percent(fmean(found["lm loss"][-half:]), 2)])
    return table(("run", "against", "steps", "loss", "gradient norm", f"loss, last {half} steps"), rows)


def times(path: str, against: str) -> str:
    """Milliseconds per step once the first eight are over, and how much faster than the run ``against``."""
    found = {
        run: spread([step["ms"] for step in steps if step["iteration"] > 8]) for run, steps in trainings(path).items()
    }
    rows = [
        [
            run,
            f"{kept['median']:.1f} ({kept['p10']:.1f}…{kept['p90']:.1f})",
            f"{found[against]['median'] / kept['median']:.2f}{X}",
        ]
        for run, kept in found.items()
    ]
    return table(("run", "ms per step, median (p10…p90)", f"vs {against}"), rows)


def parity(path: str) -> str:
    """What ``scripts/parity.py`` ran: two stock trainings, flux, and each resumed from the other half-way."""
    first, resumed = ("stock", "stock-again", "flux"), ("stock-from-flux", "flux-from-stock")
    pairs = [("stock-again", "stock"), ("flux", "stock"), ("flux", "stock-again")]
    pairs += [(run, other) for run in resumed for other in first]
    losses = {run: [step["lm loss"] for step in steps] for run, steps in trainings(path).items()}
    last = ([run, f"{fmean(of[-50:]):.4f}"] for run, of in losses.items())
    return f"{curves(path, pairs)}\n{table(('run', 'mean loss of the last 50 steps'), last)}"


def repeated(folder: str, names: Iterable[str]) -> str:
    """Trainings of which stock's may repeat itself to the bit: where each of the others first differs from it."""
    rows = []
    for name in names:
        runs = trainings(f"{folder}/{name}.json")
        for run in (run for run in runs if run != "stock"):
            found = {curve: apart(runs[run], runs["stock"], curve) for curve in CURVES}
            differs = [place for place, both in enumerate(zip(*found.values(), strict=True), 1) if any(both)]
            cells = [f"{percent(fmean(of), 2)}, {percent(max(of), 1)}" for of in found.values()]
            count = len(found["lm loss"])
            rows.append([name, run, str(count), str(differs[0]) if differs else "none", *cells])
    return table(("training", "run", "steps", "first step that differs", "loss", "gradient norm"), rows)


def shared_gpu(folder: str) -> str:
    """Trainings of ranks that share a GPU."""
    return repeated(folder, ("fp8-blockwise", "fp8-current-before", "fp8-current", "fp8-delayed", "host"))


def graphs(folder: str) -> str:
    """Trainings with Megatron's CUDA graphs."""
    small = f"{folder}/data-parallel.json"
    pairs = [
        ("flux, graphs", "stock, graphs"),
        ("flux", "stock"),
        ("stock, graphs", "stock"),
        ("flux, graphs", "flux"),
    ]
    return (
        f"### Layers of GPT-3 175B, TP 4, both in graphs: `gpt3.json`\n\n{times(f'{folder}/gpt3.json', 'stock')}\n"
        f"{curves(f'{folder}/gpt3.json', [('flux', 'stock')])}\n"
        f"### A small GPT, TP 2 {X} DP 2: `data-parallel.json`\n\n{times(small, 'stock, graphs')}\n"
        f"{curves(small, pairs)}"
    )


def tp4(folder: str) -> str:
    """All of four GPUs."""
    return (
        f"### Layers, forward and backward: `bursts`\n\n{layers(models(f'{folder}/bursts'))}\n"
        f"### Layers, forward and backward: `sustained`\n\n{layers(models(f'{folder}/sustained'))}\n"
        f"### What the tuner measured: `bursts/tuned.json`, milliseconds\n\n"
        f"{choices(f'{folder}/bursts/tuned.json', 4)}\n"
        f"### What the tuner measured: `sustained/tuned.json`, milliseconds\n\n"
        f"{choices(f'{folder}/sustained/tuned.json', 4)}\n"
        f"### Kernels of one traced step, milliseconds per layer (`kernels.json`)\n\n"
        f"{kernels(folder, [*models('bursts'), *models('sustained')])}"
    )


def tp4_more(folder: str) -> str:
    """All of four GPUs, layers and settings that the folder before left out."""
    return (
        f"### Layers, forward and backward: `small` and `b405`\n\n{layers([f'{folder}/small', f'{folder}/b405'])}\n"
        f"### GPT-3 2048 {X} 1, every arm one CUDA graph, gathered by SMs and NCCL: `graphs-pushed`\n\n"
        f"{layers([f'{folder}/graphs-pushed'])}\n"
        f"### GPT-3 2048 {X} 1, every arm one CUDA graph, gathered by copy engine: `graphs-copies`\n\n"
        f"{layers([f'{folder}/graphs-copies'])}\n"
        f"### The same, only a capture's first calls have a handshake: `graphs-entered-once`\n\n"
        f"{layers([f'{folder}/graphs-entered-once'])}\n"
        f"### `CUDA_DEVICE_MAX_CONNECTIONS` 1 and 8, GPT-3 2048 {X} 4: `conn1` and `conn8`\n\n"
        f"{connections(f'{folder}/conn1', f'{folder}/conn8')}\n"
        f"### What the tuner measured: `tuned.json`, milliseconds\n\n"
        f"{choices(f'{folder}/tuned.json', 4, LEFT_OUT)}\n"
        f"### Kernels of one traced step, milliseconds per layer (`kernels.json`)\n\n"
        f"{kernels(folder, ['small', 'b405'])}"
    )


def ops_sustained(folder: str) -> str:
    """Operators with plans chosen at the power limit, and beside the run before."""
    there, here = (
        [row for run in runs for row in read(f"{run}/summary.json")["rows"]]
        for runs in (
            ("ops-h200x4-nvlink/m8192", "ops-h200x4-nvlink/smaller"),
            (f"{folder}/m8192", f"{folder}/m2048"),
        )
    )
    return (
        f"### m = 8192\n\n{operators(read(f'{folder}/m8192/summary.json'))}\n"
        f"### m = 2048\n\n{operators(read(f'{folder}/m2048/summary.json'))}\n"
        f"### Beside `../ops-h200x4-nvlink/`, there / here\n\n{beside(there, here)}"
    )


def stand_in(folder: str) -> str:
    """All of two GPUs that stand in for eight."""
    return (
        f"### Layers, forward and backward: `bursts`\n\n{layers(models(f'{folder}/bursts'))}\n"
        f"### Layers, forward and backward: `sustained`\n\n{layers(models(f'{folder}/sustained'))}\n"
        f"### Layers, forward and backward: `more`\n\n{layers([f'{folder}/more/small', f'{folder}/more/b405'])}\n"
        f"### GEMMs of backward in the order they ran, microseconds (`bursts/gemms.json`)\n\n"
        f"{backward(f'{folder}/bursts/gemms.json')}\n"
        f"### What the tuner measured: `sustained/tuned.json`, milliseconds\n\n"
        f"{choices(f'{folder}/sustained/tuned.json', 8)}\n"
        f"### What the tuner measured: `more/tuned.json`, milliseconds\n\n"
        f"{choices(f'{folder}/more/tuned.json', 8, LEFT_OUT)}\n"
        f"### All-gather + GEMM, SMs that push beside the copy engine (`mix.jsonl`), milliseconds\n\n"
        f"{turns(f'{folder}/mix.jsonl')}\n"
        f"### GEMM + reduce-scatter, pieces under way at once (`flight.jsonl`), milliseconds\n\n"
        f"{turns(f'{folder}/flight.jsonl')}\n"
        f"### Kernels of one traced step, milliseconds per layer (`kernels.json`)\n\n"
        f"{kernels(folder, [*models('bursts'), *models('sustained')])}"
    )


def before_after(folder: str) -> str:
    """Calls, then layers, before and after a change; the raw rounds alternate with those of the host."""

    def placed(row: dict[str, Any], side: str) -> list[float]:
        # On a warmer GPU, which whoever runs second in a round has, long calls take up to a tenth longer.
        pairs = [*zip(row[side], row["first"], strict=True)]
        return [median(time for time, first in pairs if (first == side) is place) for place in (True, False)]

    def cells(row: dict[str, Any], digits: int) -> list[str]:
        before, after = placed(row, "before"), placed(row, "after")
        ratio = math.prod(a / b for a, b in zip(after, before, strict=True)) ** 0.5
        return [f"{fmean(before):.{digits}f}", f"{fmean(after):.{digits}f}", f"{ratio:.3f}"]

    tables = []
    for name, digits in (("operators", (3, 1)), ("layers", (2, 0))):
        rows = [json.loads(line) for line in (HERE / folder / f"{name}.jsonl").read_text().splitlines()]
        lines = []
        for time, host in zip(rows[::2], rows[1::2], strict=True):
            if name == "operators":
                what = f"{time['model']} {time['layer']} {time['direction']}, {time['op']}"
            else:
                what = f"{time['model']} {time['seq']} {X} {time['micro_batch']}, {time['spec']}"
            lines.append((what, *cells(time, digits[0]), *cells(host, digits[1])))
        heads = [name, "ms before", "ms after", "ratio", "host \u00b5s before", "host \u00b5s after", "ratio"]
        tables.append(table(heads, lines))
    return "\n".join(tables)


def host_calls(path: str) -> str:
    """One row per call of a run of ``bench ops`` with an 8-bit wire: milliseconds, and over GEMM and NCCL in turn."""
    rows = []
    for row in read(path)["rows"]:
        times = [row[f"{method}_ms"] for method in ("chunked", "chunked_fp8", "tuned")]
        rows.append(
            [
                *named(row),
                *(f"{row[f'{method}_ms']:.3f}" for method in ("gemm", "nccl", "serial")),
                *(f"{ms:.3f} ({row['serial_ms'] / ms:.2f}{X})" for ms in times),
                row["tuned_choice"],
            ]
        )
    head = ("operator", f"m {X} n {X} k", "GEMM", "NCCL", "one after the other", "chunked", "chunked_fp8", "tuned",
            "choice")  # fmt: skip
    return table(head, rows)


def host_trainings(folder: str, warm_up: int = 4) -> str:
    """Steps of a training with each wire beside stock's, without the first ``warm_up``: milliseconds and losses."""
    rows = []
    for wire in ("exact", "fp8"):
        stock, flux = (lines(f"{folder}/compare-{wire}/{arm}/metrics.jsonl") for arm in ("baseline", "flux"))
        times = [[1e3 * step["iteration-time"] for step in run[warm_up:]] for run in (stock, flux)]
        off = apart(flux, stock, "lm loss")
        rows.append(
            [
                wire,
                *(f"{median(found):.1f} ({min(found):.1f}…{max(found):.1f}), {len(found)} steps" for found in times),
                f"{median(times[0]) / median(times[1]):.2f}{X}",
                f"{percent(fmean(off), 2)}, {percent(max(off), 1)}",
            ]
        )
    head = ("wire", "stock, ms per step (all)", "flux", "speed-up", "loss against stock: mean, largest")
    return table(head, rows)


def host_link(folder: str) -> str:
    """Layers, calls and trainings, then single calls of trials: milliseconds of the device, of the host in brackets."""
    calls = {name: read(f"{folder}/{name}/calls.json") for name in ("one-lane", "two-lanes")}
    heads = ["lanes each way", "shape", "GEMM", "NCCL", "one after the other", "transfers, slots of 2 MB", "of 4 MB"]
    heads += [f"chunked, {pieces} pieces" for pieces in (2, 4, 8)] + ["chunked_fp8, 1 piece", "2 pieces"]
    keys = {
        "all-gather + FC1": ("gemm1", "nccl_ag", "serial1", "gather {}", "ag p{}", "ag8 p{}"),
        "FC2 + reduce-scatter": ("gemm2", "nccl_rs", "serial2", "exchange {}", "rs p{}", "rs8 p{}"),
    }
    rows = []
    for lanes, found in calls.items():
        ring = "x6/3" if lanes == "one-lane" else "x6"
        for model, times in found.items():
            for call, (gemm, nccl, serial, moved, exact, coarse) in keys.items():
                picked = [gemm, nccl, serial, moved.format(f"2MB{ring}"), moved.format(f"4MB{ring}")]
                picked += [exact.format(pieces) for pieces in (2, 4, 8)] + [coarse.format(pieces) for pieces in (1, 2)]
                cells = [f"{times[key][0]:.2f} ({times[key][1]:.2f})" for key in picked]
                rows.append([lanes.split("-")[0], f"GPT-3 {model.upper()}, {call}", *cells])
    found = [layers(f"{folder}/{run}" for run in ("layer-2048x16", "graphs-2048x4", "layer-2048x4"))]
    found += [host_calls(f"{folder}/ops/summary.json"), host_trainings(folder), table(heads, rows)]
    return "\n".join(found)


def wires(folder: str) -> str:
    """Errors of the operators by wire, then how far trainings over each are from stock's."""
    keys = ("all_gather", "all_gather_gemm", "gemm_reduce_scatter")
    found = [[row["input"], row["wire"], *(f"{row[key]:.1e}" for key in keys)] for row in read(f"{folder}/errors.json")]
    rows = []
    for wire in ("fp8", "int8"):
        stock, flux = (lines(f"{folder}/{wire}/{arm}/metrics.jsonl") for arm in ("baseline", "flux"))
        off = apart(flux, stock, "lm loss")
        last = (f"{fmean(step['lm loss'] for step in run[-50:]):.4f}" for run in (stock, flux))
        rows.append([wire, str(len(off)), f"{percent(fmean(off), 2)}, {percent(max(off), 1)}", *last])
    head = ("wire", "steps", "loss against stock: mean, largest", "stock, mean of the last 50 steps", "flux")
    return f"{table(('input', 'wire', *keys), found)}\n{table(head, rows)}"


def fp8_ways(folder: str) -> str:
    """The fastest plan of every way to multiply, against cuBLASLt, lasting and in bursts."""
    bursts, rows = {}, []
    for line in lines(f"{folder}/fp8.jsonl"):
        if "ms" in line:
            bursts[line["of"][0]] = line["ms"]
        if "lasting_ms" not in line:
            continue
        shape, ms = line["of"][0], line["lasting_ms"]
        for way in ("fast", "split", "blocks"):
            own = min((name for name in ms if name.startswith(f"{way} ")), key=ms.__getitem__)
            other, burst = ms[f"cublas {way}"], bursts[shape]
            times = (f"{ms[own]:.3f}", f"{other:.3f}", f"{other / ms[own]:.3f} {X}", f"{ms['cublas bf16']:.3f}")
            last = f"{burst[f'cublas {way}'] / burst[own]:.3f} {X}"
            rows.append([shape, way, own.removeprefix(f"{way} "), *times, last])
    head = ("GEMM", "sums", "fastest plan", "kernel, ms", "cuBLASLt, ms", "kernel's speed", "cuBLAS bf16, ms",
            "its speed in bursts")  # fmt: skip
    return table(head, rows)


SCHEDULED = {
    "GPT-3 FC1, one scale": ("gpt3 ag", "split 128x256 s4"),
    "GPT-3 FC1, blocks": ("gpt3 ag", "blocks 128x256 s4"),
    "Llama FC2, one scale": ("llama rs", "split 128x256 s3 b16"),
    "Llama FC2, blocks": ("llama rs", "blocks 128x256 s3 b4"),
    "m=8192, n=k=4096: gathered, one scale": ("small ag", "split 128x256 s4"),
    "scattered, one scale": ("small rs", "split 128x256 s3 b16"),
}


def fp8_schedules(folder: str) -> str:
    """:func:`fp8_ways`; then promoted sums by schedule: a process each, over cuBLASLt in it, in bursts and lasting."""
    found: dict[tuple[int, int], tuple[str, dict[tuple[str, str], str]]] = {}
    for line in lines(f"{folder}/schedule.jsonl"):
        cells = found.setdefault((line["machine"], line["process"]), (line["schedule"], {}))[1]
        for key in ("ms", "lasting_ms"):
            for arm, ms in line.get(key, {}).items():
                stock = line[key][f"cublas {arm.split()[0]}"] if not arm.startswith("cublas") else None
                if stock is not None:
                    cells.setdefault((line["of"][0], arm), "")
                    cells[line["of"][0], arm] += ("" if key == "ms" else ", ") + f"{stock / ms:.3f}"
    rows = [
        [str(machine), schedule, *(cells.get(arm, "-") for arm in SCHEDULED.values())]
        for (machine, _), (schedule, cells) in found.items()
    ]
    return f"{fp8_ways(folder)}\n{table(('machine', 'schedule', *SCHEDULED), rows)}"


def fp8_gemms(folder: str) -> str:
    """:func:`fp8_ways`; then bf16 before and after the kernels took FP8."""
    before, after = (read(f"{folder}/bf16-{when}.json") for when in ("before", "after"))
    calls = [
        [name, *(f"{run[name]['ms'][arm]:.3f}" for arm in ("kernel", "cublas") for run in (before, after))]
        for name in before
    ]
    titles = ("bf16", "kernel before", "kernel after", "cuBLAS, first run", "cuBLAS, second run")
    return f"{fp8_ways(folder)}\n{table(titles, calls)}"


def _over_cublas(line: Json, key: str) -> dict[str, str]:
    """Speeds over cuBLASLt's of the arms of a line of ``fp8-scatter``."""
    ms = line.get(key, {})
    return {arm: f"{ms['cublas'] / of:.3f}" for arm, of in ms.items() if arm != "cublas"}


def fp8_scatter(folder: str) -> str:
    """:func:`fp8_ways`; scattering kernels with SMs aside; with parts left out; and the tuner's lasting times."""
    sides: dict[str, list[str]] = {}
    for line in lines(f"{folder}/aside.jsonl"):
        for key, arms in (("burst_ms", ("base", "aside", "nored")), ("lasting_ms", ("base", "aside"))):
            found = _over_cublas(line, key)
            sides.setdefault(line.get("label", ""), []).extend(found[arm] for arm in arms if found)
    first = table(
        ("GEMM", "added on every SM, bursts", "aside", "not added", "added on every SM, lasting", "aside"),
        [[label.replace("split", "one scale, promoted"), *cells] for label, cells in sides.items() if cells],
    )
    left: dict[tuple[int, str], dict[str, list[str]]] = {}
    for line in lines(f"{folder}/left-out.jsonl"):
        for key in ("burst_ms", "lasting_ms"):
            for arm, speed in _over_cublas(line, key).items():
                left.setdefault((line["machine"], line["label"]), {}).setdefault(arm, []).append(speed)
    arms = list(dict.fromkeys(arm for cells in left.values() for arm in cells))
    rows = [[arm, *(", ".join(cells.get(arm, ["-"])) for cells in left.values())] for arm in arms]
    second = table(("arm", *(f"{machine}: {label}" for machine, label in left)), rows)
    calls = []
    for key, kept in read(f"{folder}/tuned.json").items():
        call = key.partition(", to bfloat16")[0].removeprefix("gemm_reduce_scatter ")
        cells = [call.replace("=", " = "), f"{kept['gemm_ms']:.3f}"]
        for name in ("ms", "sustained_ms"):
            for aside in (False, True):
                of = [ms for plan, ms in kept[name].items() if plan != "reference" and ("aside" in plan) is aside]
                cells.append(f"{min(of):.3f}" if of else "-")
        calls.append(cells)
    head = ("call", "cuBLASLt alone, bursts", "every SM, bursts", "aside", "every SM, lasting", "aside")
    return "\n".join((fp8_ways(folder), first, second, table(head, calls)))


RECIPES = ("current", "delayed", "blockwise")
FP8_HEAD = ("recipe", "arm", "ms per layer (quartiles)", "vs TE", "hidden", "MHz")


def fp8_arms(run: str, recipe: str) -> list[list[str]]:
    """Rows of the arms of a run of ``bench layer`` in FP8."""
    rows = []
    for row in read(f"{run}/summary.json")["rows"]:
        if row["fp8"] == recipe:
            cells = (ARMS[row["arm"]], with_quartiles(row), f"{row['speedup_vs_te']:.3f}{X}")
            rows.append([recipe, *cells, percent(row["hidden_share"]), f"{row['sm_clock_mhz']:.0f}"])
    return rows


def fp8_layers(folder: str, tuning: Sequence[str] = ()) -> str:
    """Layers by recipe, then what the tuner measured in bursts of each call on FP8 operands. The recipes ``tuning`` are
    those of the run in which it did so.
    """
    rows = []
    for recipe in RECIPES:
        run = "layer-tuning" if recipe in tuning else "layer"
        rows += fp8_arms(f"{folder}/{run}", recipe)
    calls = []
    for key, kept in read(f"{folder}/tuned.json").items():
        call, _, rest = key.partition(" [n,k] ")
        if rest and "e4m3fn" in call:
            operator, m, n, k, *kind = call.split()
            sizes = X.join(size.partition("=")[2] for size in (m, n, k))
            own = min(ms for name, ms in kept["ms"].items() if name != "reference")
            stock, gemm = kept["ms"]["reference"], kept["gemm_ms"]
            words = " ".join(kind).removesuffix(", to bfloat16")
            times = [f"{ms:.3f}" for ms in (gemm, stock, own)]
            calls.append([SHORT[operator], sizes, words, *times, f"{stock / own:.2f}{X}", f"{gemm / own:.2f}"])
    titles = ("call", f"m{X}n{X}k", "operands", "cuBLASLt alone, ms", "cuBLASLt and NCCL", "fused, fastest plan",
              "fused over both", "GEMM alone / fused")  # fmt: skip
    return f"{table(FP8_HEAD, rows)}\n{table(titles, calls)}"


def fp8_own_rows(folder: str) -> str:
    """Layers in FP8 by run, trainings, and the transpose beside copies."""
    runs = ("h200", "h100", "h100-before", "h100-before-again", "h100-before-other")
    rows = [[run, *row] for run in runs for recipe in RECIPES for row in fp8_arms(f"{folder}/{run}", recipe)]
    found = read(f"{folder}/transpose.json")
    sizes = []
    for size in found["sizes"]:
        times = [median(turn[1] for turn in size[name]) for name in ("transpose_kernel", "copy of all", "own rows")]
        sizes.append([found["device"], *(str(size[name]) for name in ("m", "k", "tp")), *(f"{ms:.4f}" for ms in times)])
    titles = ("GPU", "m", "k", "tp", "transpose, ms", "a copy of as much", "of the own rows")
    tables = table(("run", *FP8_HEAD), rows), repeated(folder, RECIPES), table(titles, sizes)
    return "\n".join(tables)


def inference(folder: str) -> str:
    """What ``bench inference`` found, a row for each call: milliseconds of each arm, and how much faster than stock."""
    found: dict[str, list[list[str]]] = {}
    heads: dict[str, list[str]] = {}
    for run in ("layers", "calls"):
        calls: dict[tuple[Any, ...], dict[str, Json]] = {}
        for row in read(f"{folder}/{run}/summary.json")["rows"]:
            what = row.get("layer", "MLP")
            if "layers" in row:
                what = f"{row['layers']} layer{'s' * (row['layers'] > 1)}"
            calls.setdefault((row["kind"], row["model"], what, row["m"]), {})[row["arm"]] = row
        for (kind, model, what, m), arms in calls.items():
            rounds = {row["rounds"] for row in arms.values()}
            cells = [f"{row['ms']:.4g} ({row['speedup_vs_stock']:.2f}{X})" for row in arms.values()]
            heads[kind] = [kind, "m", "rounds", *(ARMS.get(arm, arm) for arm in arms)]
            found.setdefault(kind, []).append([f"{model}, {what}", str(m), "/".join(map(str, sorted(rounds))), *cells])
    return "\n".join(table(heads[kind], rows) for kind, rows in found.items())


def first_steps(path: str) -> str:
    """Seconds from the command to the end of its first three steps, by arm."""
    arms = read(path)["arms"]
    rows = [[arm, *(f"{found['step_ends_s'].get(str(step), math.nan):.1f}" for step in (1, 2, 3))]
            for arm, found in arms.items() if arm != "warm"]  # fmt: skip
    return table(("arm", "first step", "second", "third"), rows)


def fp8_parity(folder: str) -> str:
    """Two trainings of stock and one of flux, of each file."""
    pairs = (("stock-again", "stock"), ("flux", "stock"), ("flux", "stock-again"))
    return "\n".join(
        f"{name}:\n\n{curves(f'{folder}/{name}.json', pairs)}"
        for name in ("current-before", "delayed-before", "blockwise", "host")
    )


FOLDERS: dict[str, Callable[[str], str]] = {
    "layer-h200x4-ahead": tp4,
    "layer-h200x4-more": tp4_more,
    "ops-h200x4-sustained": ops_sustained,
    "stand-in-8-h200x2-ahead": stand_in,
    "power-h200": lambda folder: energy(f"{folder}/energy.jsonl"),
    "parity-h200x4-dp": lambda folder: parity(f"{folder}/curves.json"),
    "megatron-graphs-h200x4": graphs,
    "refactor-h200x2": before_after,
    "host-link-h200x2": host_link,
    "wire-cpu": wires,
    "fp8-gemm-h200": fp8_gemms,
    "fp8-gemm-h100": fp8_schedules,
    "two-ranks-one-h200": shared_gpu,
    "fp8-scatter": fp8_scatter,
    "fp8-h200x2": fp8_layers,
    "fp8-h100x2": lambda folder: fp8_layers(folder, ("blockwise",)),
    "fp8-own-rows": fp8_own_rows,
    "inference-h200x2": inference,
    "first-step-h200x2": lambda folder: first_steps(f"{folder}/delay.json"),
    "parity-h200x2-fp8": fp8_parity,
    "parity-h100x2-fp8": lambda folder: repeated(folder, RECIPES),
}


def rewritten(folder: str, text: str) -> str:
    """The text of a folder's README with the tables as they are now."""
    return between_marks(text, FOLDERS[folder](folder))


if __name__ == "__main__":
    for name in sys.argv[1:] or FOLDERS:
        readme = HERE / name / "README.md"
        readme.write_text(rewritten(name, readme.read_text()))
